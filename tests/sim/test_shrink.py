"""Shrinking: what comes out is small, still fails in the same property, and replays from a token."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from ppsim import cases, fuzz, hunts, mutants, programs, shortest, shrink, small, tokens
from ppsim.strategies import Switch, Switches


def shrunk(name: str) -> tuple[fuzz.Finding, fuzz.Finding]:
    """A catalogue bug's failure as the fuzzer meets it, and shrunk; call it with the bug planted."""
    number = next(n for n, done in fuzz.executions(0, 3000) if done.failure is not None)
    whole = fuzz.finding(number)
    assert whole is not None
    return whole, shrink.shrink(whole)


#: What nothing is said of, by the page on the simulator: it fails without any bug planted.
LIMITS = (
    "stages 2 columns 2 layers 1 shared 0 batching 0\nrequest A tokens 1\n  a = read L1.out\n"
    "  b = call E a\n  c = read samples\n  blend c b\n",
    "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\nblock A tap\n  cache x\n"
    "fault abort A 0\n",
)


@pytest.mark.parametrize("text", LIMITS)
def test_what_fails_without_the_bug_is_no_witness_of_it(text: str) -> None:
    case = cases.parse(text)
    assert fuzz.execute(case, Switches()).failure is not None
    assert shrink.witnesses(case, Switches()), "no bug is planted: what fails is what was found"
    with mutants.planted(mutants.named("done-not-said")):
        assert fuzz.execute(case, Switches()).failure is not None
        assert not shrink.witnesses(case, Switches())


def test_shrinking_does_not_slip_to_what_fails_without_the_bug() -> None:
    limit, kept = cases.parse(LIMITS[0]), LIMITS[0] + "  save x c\n"
    kept = kept.replace("  blend", "  c = derive c 1\n  blend")  # an edit that is no limit
    with mutants.planted(mutants.named("merge-prefers-the-lazy")):
        _, found = fuzz.record(cases.parse(kept), Switches())
        assert found is not None
        shrinker = shrink._Shrinker(found, 100, None)
        failure = fuzz.execute(limit, Switches()).failure
        assert failure is not None and failure.name == found.failure.name, "it fails alike"
        assert not shrinker.fails(limit, (), 4)
        assert shrinker.best is found


def test_two_statements_go_together_where_neither_goes_alone() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n  a = read L0.out\n"
        "  if a\n    b = read L1.in\n    save x b\n"
    )
    texts = [cases.spell(less).split("tokens 1\n")[1] for less in shrink._without_two(case)]
    assert sorted(texts) == [
        "  a = read L0.out\n",  # the branch, and what is left of its body
        "  if a\n    b = read L1.in\n",
        "  if a\n    save x b\n",
    ]


@pytest.mark.parametrize(
    "name", ["done-not-said", "never-waits", "no-gate", "published-after-it-was-asked-for"]
)
def test_a_failure_shrinks_to_a_few_statements_and_its_token_replays(name: str) -> None:
    with mutants.planted(mutants.named(name)):
        whole, small = shrunk(name)
        token = tokens.encode(small.case, small.switches)
        case, switches = tokens.decode(token)
        again = fuzz.execute(case, Switches(switches)).failure
    assert again is not None
    assert again.name == small.failure.name == whole.failure.name
    assert shrink.length(small) <= min(5, shrink.length(whole))
    assert len(token) <= 64
    assert fuzz.execute(case, Switches(switches)).failure is None, "fails without the bug too"


def test_where_deletions_end_another_case_that_fails_alike_ends_lower() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 2\n  a = read L0.in\n"
        "  write L1.out a\nblock A tap\n  a = read L0.in\n  if a\n    save x a\n"
    )
    schedule = [Switch("engine", 0, "f0.0"), *[Switch("f0.0", 34, "f1.0")] * 2]
    with mutants.planted(mutants.named("released-but-the-first")):
        _, found = fuzz.record(case, Switches(schedule))
        assert found is not None
        assert shrink.length(found) == 8, "no statement and no switch can go"
        shrinker = shrink._Shrinker(found, 3000, None)
        shrinker.start_elsewhere()
    assert shrink.length(shrinker.best) <= 4


def test_every_field_of_a_statement_is_known_to_shrinking() -> None:
    # A field that shrinking does not know would keep its old name beside renamed ones.
    other = {"steps", "start", "stop", "body", "slot", "inputs"}
    known = shrink.NAMES | shrink.LABELS | shrink.PLACES | shrink.NUMBERS | other
    kinds = [kind for kind in vars(programs).values() if hasattr(kind, "__dataclass_fields__")]
    assert len(kinds) > 10
    for kind in kinds:
        assert {field.name for field in fields(kind)} <= known, kind


def test_a_canonical_case_is_the_same_but_for_names() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest C tokens 1\n"
        "  v3 = read L0.out\n  m = mix v3 v3\n  if m\n    save s9 m\nfault raise 0 0 C 1\n"
    )
    assert cases.spell(shrink.canonical(case)) == (
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n"
        "  a = read L0.out\n  b = mix a a\n  if b\n    save x b\nfault raise 0 0 A 1\n"
    )


def test_names_are_given_in_order_however_few_runs_there_were() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest C tokens 1\n  v3 = read L0.out\n"
    )
    with mutants.planted(mutants.named("done-not-said")):
        _, found = fuzz.record(case, Switches())
        assert found is not None
        small = shrink.shrink(found, tries=0)
    assert small.case == shrink.canonical(case) != case


def test_a_stage_less_moves_its_layers_to_the_neighbour() -> None:
    case = cases.parse(
        "stages 3 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n"
        "  a = read L2.out\n  a = read L1.out\nfault raise 2 0 A 1\n"
    )
    texts = [cases.spell(less) for less in shrink.smaller(case) if less.stages == 2]
    assert (
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n"
        "  a = read L1.out\n  a = read L1.out\nfault raise 1 0 A 1\n"
    ) in texts


def test_alternatives_lead_away_from_the_base_schedule() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n  a = read L0.out\n"
    )
    plain = fuzz.execute(case, Switches())
    found = shrink.alternatives(case, ())
    assert len(found) > 10
    hashes = {fuzz.execute(case, Switches([one])).hash for one in found}
    assert plain.hash not in hashes


# --- the shortest ---------------------------------------------------------------------------------


def test_the_search_for_the_shortest_finds_it() -> None:
    with mutants.planted(mutants.named("done-not-said")):
        case = cases.parse(
            "stages 2 columns 1 layers 1 shared 0 batching 0\n"
            "request A tokens 1\n  a = read L0.out\n  b = derive a 1\n  save x b\n"
        )
        _, found = fuzz.record(case, Switches())
        assert found is not None
        least = shortest.shortest(found, seconds=30)
        cut = shortest.shortest(found, seconds=0)
    assert (least.length, least.exhausted) == (1, True)
    assert (cut.length, cut.exhausted) == (1, False)


def test_the_programs_of_a_length_are_all_there_once() -> None:
    frame = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n  stop\n"
    )
    places = sum(map(len, cases.visits(frame))) + 1
    one = [cases.spell(case) for case in small.programs(frame, 1)]
    assert len(one) == len(set(one)) == places + 2  # a read of each place, stop, raise
    two = [cases.spell(case) for case in small.programs(frame, 2)]
    assert len(two) == len(set(two))
    assert all(shrink.statements(cases.parse(text)) == 2 for text in two)


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(0, 200, 9))
def test_a_token_holds_any_case(number: int) -> None:
    case = fuzz.case_of(number)
    switches = (Switch("f0.0", number, "l1.0<0"), Switch("engine", 3, "f0.0"))
    assert tokens.decode(tokens.encode(case, switches)) == (case, switches)
    assert tokens.decode(tokens.encode(case)) == (case, ())


def test_tokens_of_the_first_dictionary_stay_good() -> None:
    case, switches = tokens.decode("1o7KhhujpBCwADBYDcJABAA")
    assert cases.spell(case) == (
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n"
        "  a = read L1.in\n  b = read L1.in\n"
    )
    assert switches == (Switch("f1.0", 0, "l0.0<1"),)


def test_tokens_of_later_versions_stay_good() -> None:
    case = cases.parse(
        "stages 3 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 2\n  for :\n"
        "    a = read L1.out\n    if a\n      save x a\nfault stall 0 0 2 1 40\n"
    )
    switches = (Switch("f0.0", 6, "l1.0<2"), Switch("engine", 3, "f1.1"))
    third = "3AKCmMNQDCkeU-hJtT1SBRHU61k6eNF"
    for token in ("2ASoA57q5Wl2kYQorPbZ_tQPLHV27yczajoqgkE", third):
        assert tokens.decode(token) == (case, switches)
    assert tokens.encode(case, switches) == third


def test_a_switch_takes_a_few_characters_of_a_token() -> None:
    # Met for real: a shrunk failure of the catalogue with eight switches had a token of 71 characters.
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n  a = read L0.out\n"
    )
    bare = len(tokens.encode(case))
    names = ["engine", "f0.0", "f1.0", "l0.0<1", "l1.0<0"]
    for seed in range(5):
        draw, steps = random.Random(seed), dict.fromkeys(names, 0)
        switches = []
        for _ in range(8):
            task, to = draw.sample(names, 2)
            steps[task] += draw.randrange(1, 8)
            switches.append(Switch(task, steps[task], to))
        token = tokens.encode(case, tuple(switches))
        assert tokens.decode(token) == (case, tuple(switches))
        # At random: each is one of 5 * 4 * 7 at each of eight places, 8 * 7.1 bits, 10 characters.
        assert len(token) <= bare + 8 * 4


def test_a_switch_of_a_task_without_a_letter_is_spelled_out() -> None:
    case = cases.parse(
        "stages 6 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n  a = read L0.out\n"
    )
    switches = (Switch("f0.0", 3, "f5.0"), Switch("l5.0<4", 0, "f0.0"))
    assert tokens.decode(tokens.encode(case, switches)) == (case, switches)


WRONG = [
    "",
    "1",
    "9abc",
    "1%%%",
    "1AAAA",
    "2",
    "2%",
    "2AAAA",
    "2no-such_token",
    "3",
    "3%",
    "3AAAA",
    "3no-such_token",
    "no such file.case",
]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        tokens.decode(text)


def test_wilson_intervals() -> None:
    # The worked values of Wilson's interval for 0 of 10 and 5 of 10 at 95%.
    assert hunts.Rate(0, 10).interval == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert hunts.Rate(5, 10).interval == pytest.approx((0.2366, 0.7634), abs=1e-3)
    assert hunts.Rate(0, 0).interval == (0.0, 1.0)
