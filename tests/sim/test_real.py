"""The second mode: the real runtime under the simulator's schedules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("nnsight") is None:
    pytest.skip("needs torch and nnsight", allow_module_level=True)

import torch

from ppcore.runtime.link import Link
from ppsim import cases, fuzz, generate, real
from ppsim.failures import Liveness, Sameness
from ppsim.real import execute, translate, upstream
from ppsim.real.world import Channels, World
from ppsim.strategies import RandomWalk, Replay, Switches

REPO = Path(__file__).resolve().parents[2]

#: What the second mode has found in the runtime, and what was wrong.
FOUND = {
    # A lazy over a real tensor that is edited afterwards was made outside of inference mode, at the
    # collect, where torch refuses to edit what the forward made.
    "an edit behind a mixture of both stages' values": """\
stages 2 columns 1 layers 1 shared 0 batching 0
request A tokens 1
  a = read L0.in
  b = read L1.in
  b = mix a b
  edit a 1
  save x b
""",
    # A call that the owner refuses came home as "unreachable".
    "an error on one stage ends the worker that is parked on another": """\
stages 2 columns 1 layers 1 shared 0 batching 0
request A tokens 1
  a = read L1.in
  b = call N a
  raise 1
  c = read L0.out
""",
    # A loop over several turns with values of both stages, kept and branched on.
    "a branch on the later stage's value steers the earlier stage": """\
stages 2 columns 1 layers 1 shared 0 batching 3
request A tokens 4
  for :
    a = read L0.out
    b = read L1.out
    if b
      edit a 3
    append x a
    c = mix a b
    append y c
request B tokens 3
  for 1:
    a = read L1.in
    write L1.out a
    save x a
""",
    "a cache, a skip and a container": """\
stages 3 columns 1 layers 1 shared 1 batching 0
container rows 2
request A tokens 3
  cache k in L0 L2
  a = read L0.out
  skip L1 a
  put rows 1 a
  b = read L2.out
  edit b 2
  save x b
block A tap
  a = read S.out
  save s a
""",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(text: str, seed: int = 0) -> Any:
    return real.run(cases.parse(text), RandomWalk(seed))


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_holds_under_many_schedules(name: str) -> None:
    case = cases.parse(FOUND[name])
    for how in (Switches(), *map(RandomWalk, range(8))):
        failure = real.run(case, how).failure
        assert failure is None, failure


def test_generated_programs_are_the_same_as_on_one_rank() -> None:
    with fuzz.in_mode("real"):
        for number, done in fuzz.executions(400, 24):
            assert done.failure is None, f"execution {number}: {done.failure}"


def test_a_run_is_a_function_of_its_case_and_its_seed() -> None:
    case = generate.case(7)
    hashes = {(w.hash, w.events) for w in (real.run(case, RandomWalk(7)) for _ in range(4))}
    assert len(hashes) == 1
    others = {real.run(case, RandomWalk(seed)).hash for seed in range(4)}
    assert len(others) > 1


def test_a_run_does_not_depend_on_the_process() -> None:
    code = (
        "from ppsim import generate, real; from ppsim.strategies import RandomWalk\n"
        "print([real.run(generate.case(s), RandomWalk(s)).hash for s in (2, 3, 8)])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPO,
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_a_recorded_schedule_replays() -> None:
    case = generate.case(11)
    first = real.run(case, RandomWalk(3), record=True)
    again = real.run(case, Replay(first.schedule), record=True)
    assert (again.hash, again.schedule) == (first.hash, first.schedule)


def test_a_value_published_without_a_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """\
stages 2 columns 1 layers 1 shared 0 batching 0
request A tokens 1
  a = read L0.out
  b = derive a 1
  edit a 3
  c = read L1.out
  d = mix c b
  write L1.out d
  save x d
"""
    assert run(text).failure is None
    monkeypatch.setattr(Link, "_keep", lambda self, tensor: tensor)
    assert isinstance(run(text).failure, Sameness)


def of_text(text: str, seed: int) -> World:
    """Two stages run one request for a token, whose block is this text."""
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\nrequest A tokens 1\n  stop\n"
    )
    shape = execute.shape(case)
    blocks = {"A": {"": execute.payload(text, execute._client(shape), {})}}
    world = World(case, blocks, execute.column(shape))
    world.run(RandomWalk(seed))
    if world.failure is not None:
        del execute._columns[shape]
    return world


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_asks_for_what_another_never_read_is_told(seed: int) -> None:
    # Every rank runs the same block and reads the same; only where the block asks which rank it is on
    # does one end without an access that another waits for.
    done = of_text(
        "import threading\n"
        "if threading.current_thread().name.startswith('f1'):\n"
        "    bool(model.model.layers[0].output[0].sum())\n"
        "logits = model.logits.save()\n",
        seed,
    )
    assert done.failure is None
    error = done.outcomes["A"].error
    assert error is not None and error.kind == "Diverged"


#: Filled by the block of the test below.
CONSEQUENCES: list[str] = []


def test_an_error_that_another_ranks_explains_is_not_the_cause() -> None:
    # That a value never comes is no stage's own error anyway; what the want of it led to would be.
    text = (
        "import threading\n"
        "from ppcore.errors import DeadlineExceeded\n"
        "from tests.sim.test_real import CONSEQUENCES\n"
        "if threading.current_thread().name.startswith('f1'):\n"
        "    raise ValueError('the cause')\n"
        "try:\n"
        "    bool(model.model.layers[1].output[0].sum())\n"
        "except Exception:\n"
        "    CONSEQUENCES.append('met')\n"
        "    raise DeadlineExceeded('the consequence') from None\n"
    )
    CONSEQUENCES.clear()
    for seed in range(60):
        done = of_text(text, seed)
        assert done.failure is None
        error = done.outcomes["A"].error
        assert error is not None and error.text == "the cause", seed
    assert CONSEQUENCES, "in none of the schedules does the first stage get to the consequence"


def test_a_lost_message_is_a_hang_with_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(self: Channels, peer: int, text: str, payload: Any = ()) -> None:
        if not text.startswith("reply"):
            send(self, peer, text, payload)

    send = Channels.send
    monkeypatch.setattr(Channels, "send", lossy)
    failure = run(
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 1\n  a = read L0.out\n  write L1.out a\n"
    ).failure
    assert isinstance(failure, Liveness)
    assert "'model.model.layers.0.output' (A#0" in str(failure) and "from stage 0" in str(failure)


def test_the_reference_is_nnsights_own_request_loop() -> None:
    for kind in (upstream.Request, upstream.Requests):
        assert kind.__module__ == "nnsight.modeling.vllm.model_runners.GPUModelRunner"
        assert "nnsight" in kind.__init__.__code__.co_filename
    assert "vllm" not in sys.modules or upstream.Requests is not getattr(
        sys.modules.get(upstream.Requests.__module__), "Requests", None
    )


def test_a_program_reads_as_an_nnsight_block() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 2\n"
        "  for 1:\n    a = read L0.out\n    if a\n      b = derive a 2\n    append out b\n"
        "  write L1.in a\n  stop\n"
    )
    assert translate.source(case) == (
        "# request A\n"
        "with model.trace([3], max_tokens=2) as tracer:\n"
        "    out = list().save()\n"
        "    a = None\n"
        "    b = None\n"
        "    for step in tracer.iter[1:]:\n"
        "        a = model.model.layers[0].output[0]\n"
        "        if a.sum() % 2 < 1:\n"
        "            b = (a * 5 + 2) % 997\n"
        "        if b is not None:\n"
        "            out.append(b)\n"
        "    if a is not None:\n"
        "        model.model.layers[1].input = "
        "(a[-1:] + torch.zeros(1, 4, dtype=torch.float64))\n"
        "    tracer.stop()\n"
    )


def test_a_loop_that_may_never_wait_is_not_run() -> None:
    text = (
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 2\n  a = read L0.out\n  for :\n    if a\n      b = read L1.out\n"
    )
    assert not translate.ends(cases.parse(text))
    assert run(text).failure is None


ACTS_ON_A_CALL = """
stages 2 columns 1 layers 1 shared 0 batching 0
request A tokens 1
  a = read L0.in
  edit a 3
block A tap
  b = read L0.in
  n = call N b
  if n
    c = derive b 1
    save d c
  q = derive b 2
  save q q
"""


def test_a_block_that_acts_on_a_call_while_another_edits_is_the_same_everywhere() -> None:
    for seed in range(10):
        assert real.run(cases.parse(ACTS_ON_A_CALL), RandomWalk(seed)).failure is None


STEERS = """
stages 2 columns 1 layers 1 shared 0 batching 0
request A tokens 1
  h = read L0.out
  n = call N h
  m = call N n
  if m
    save m m
  if n
    save n n
  edit h 5
"""


@pytest.mark.parametrize(
    "after, line", [("", 9), ("  b = read L1.out\n", 10)], ids=["at the end", "before a read"]
)
def test_an_edit_after_a_collective_call_that_the_forward_did_not_wait_for_is_an_error(
    after: str, line: int
) -> None:
    case = cases.parse(STEERS + after)
    assert execute.execute(case, RandomWalk(1)).failure is None
    stages = execute.column(execute.shape(case))
    with pytest.MonkeyPatch.context() as patched:
        for stage in stages:
            patched.setattr(stage, "collective", True)
        done = execute.execute(case, RandomWalk(1))
    error = done.outcomes["A"].error
    assert error is not None
    assert (error.kind, error.text[:45], error.line) == (
        "Missed",
        "an in-place edit of 'model.model.layers.0.out",
        line,
    )


@pytest.mark.parametrize("late", ["", "  b = read L1.out\n  edit h 5\n"], ids=["none", "later"])
def test_a_collective_call_without_an_edit_of_the_visit_that_is_over_is_none(late: str) -> None:
    case = cases.parse(STEERS.replace("  edit h 5\n", late))
    with pytest.MonkeyPatch.context() as patched:
        for stage in execute.column(execute.shape(case)):
            patched.setattr(stage, "collective", True)
        assert execute.execute(case, RandomWalk(1)).failure is None


def test_an_error_on_one_stage_is_told_though_another_stops() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 1\n  a = read L0.in\n  stop\nfault raise 1 0 A 0\n"
    )
    assert real.run(case, RandomWalk(1)).failure is None


def test_what_a_skipped_layer_holds_is_not_visited_on_any_stage() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 1 batching 0\n"
        "request A tokens 1\n  a = read L1.in\n  append out a\n  skip L1 a\n"
        "  for [1,3]\n    b = read S.out\n    append out b\n"
    )
    assert real.run(case, RandomWalk(1)).failure is None


def test_a_cache_keeps_the_turn_of_a_visit_though_another_turns_was_skipped() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 1 batching 0\n"
        "request A tokens 3\n  cache k\n  a = read L0.out\n  skip L1 a\n"
    )
    assert real.run(case, RandomWalk(1)).failure is None


def test_a_loop_that_goes_on_after_the_result_is_cut_with_the_same_words() -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 3\n  for 1:\n    a = read L1.in\n    r = read result\n    b = read L1.in\n"
    )
    assert real.run(case, RandomWalk(1)).failure is None


def test_a_failing_run_shrinks_and_replays_from_its_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ppsim import tokens
    from ppsim.shrink import shrink

    monkeypatch.setattr(Link, "_keep", lambda self, tensor: tensor)
    case = cases.parse(
        "stages 2 columns 1 layers 2 shared 0 batching 0\n"
        "request A tokens 2\n"
        "  z = read L0.in\n  a = read L1.out\n  b = derive a 1\n  edit a 3\n  c = read L3.out\n"
        "  d = mix c b\n  save x d\n  save y a\nrequest B tokens 1\n  a = read L0.out\n"
    )
    with fuzz.in_mode("real"):
        _, found = fuzz.record(case, RandomWalk(1))
        assert found is not None
        small = shrink(found, tries=60)
        assert len(cases.spell(small.case)) < len(cases.spell(case))
        again, switches = tokens.decode(tokens.encode(small.case, small.switches))
        failure = fuzz.execute(again, Switches(switches)).failure
    assert failure is not None and failure.name == found.failure.name


EDITED_MEANWHILE = """\
stages 2 columns 1 layers 2 shared 0 batching 0
request A tokens 1
  a = read L1.in
  edit a 3
block A tap
  b = read L1.in
  c = read L1.out
  write L2.in b
"""


def test_a_value_that_another_block_edits_meanwhile_is_known_to_differ() -> None:
    case = cases.parse(EDITED_MEANWHILE)
    assert translate.known_to_differ(case)
    assert execute.execute(case, Switches()).failure is not None


def test_a_block_that_waits_for_nothing_meanwhile_is_the_same_everywhere() -> None:
    case = cases.parse(
        EDITED_MEANWHILE.replace("  c = read L1.out\n  write L2.in b\n", "  save b b\n")
    )
    assert not translate.known_to_differ(case)
    assert execute.execute(case, RandomWalk(1)).failure is None


@pytest.mark.parametrize("stage", [0, 1])
def test_a_block_that_raises_on_one_rank_alone_ends_everywhere_with_that_error(stage: int) -> None:
    case = cases.parse(
        "stages 2 columns 1 layers 1 shared 0 batching 0\n"
        "request A tokens 2\n  a = read L0.in\n  b = read L0.out\n  c = read L1.out\n  write logits c\n"
        f"fault raise {stage} 0 A 0\n"
    )
    for seed in range(10):
        done = execute.execute(case, RandomWalk(seed))
        assert done.failure is None
        error = done.outcomes["A"].error
        assert error is not None and (error.kind, error.text) == ("Fault", "fault")
