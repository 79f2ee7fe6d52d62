"""Ways in which the records of a run can be wrong, each at a random place.

A kind takes the records of a run (for each rank its lines, in stage order) and returns them changed, or
None where the run has no place for it. It is defined so that what comes out is never a run of the
model: a line whose loss changes nothing, such as that of a wait, is not one that is dropped.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator

#: For each rank, the lines of its record.
Records = list[list[str]]
Corruption = Callable[[Records, random.Random], Records | None]

KINDS: dict[str, Corruption] = {}

#: An access: its arguments, and what was answered.
_ACCESS = r"(?:access|again) (.*) = (\[.*\])"


def kind(change: Corruption) -> Corruption:
    """Name a kind after its function."""
    KINDS[change.__name__.replace("_", "-")] = change
    return change


def _spots(records: Records, pattern: str) -> list[tuple[int, int]]:
    """(rank, line) of every line that matches from its start."""
    found = re.compile(pattern)
    return [
        (rank, line)
        for rank, lines in enumerate(records)
        for line, text in enumerate(lines)
        if found.match(text)
    ]


def _edit(pattern: str, change: Callable[[str], str | None]) -> Corruption:
    """Change the text of one line that matches; where ``change`` says None, another is taken."""

    def corrupt(records: Records, draw: random.Random) -> Records | None:
        spots = _spots(records, pattern)
        draw.shuffle(spots)
        for rank, line in spots:
            text = change(records[rank][line])
            if text is not None:
                records[rank][line] = text
                return records
        return None

    return corrupt


def _somewhere(pattern: str, change: Callable[[list[str], int], object]) -> Corruption:
    """Change a record at a line that matches: ``change(lines, at)``."""

    def corrupt(records: Records, draw: random.Random) -> Records | None:
        spots = _spots(records, pattern)
        if not spots:
            return None
        rank, line = draw.choice(spots)
        change(records[rank], line)
        return records

    return corrupt


def _drop(pattern: str) -> Corruption:
    return _somewhere(pattern, lambda lines, at: lines.pop(at))


def _repeat(pattern: str) -> Corruption:
    return _somewhere(pattern, lambda lines, at: lines.insert(at, lines[at]))


def _swap(pattern: str) -> Corruption:
    """Exchange two neighbouring messages of a channel."""

    def corrupt(records: Records, draw: random.Random) -> Records | None:
        pairs: list[tuple[int, int, int]] = []
        last: dict[tuple[int, str], int] = {}
        for rank, line in _spots(records, pattern):
            found = re.match(pattern, records[rank][line])
            assert found is not None
            channel = (rank, found[1])
            if channel in last and records[rank][last[channel]] != records[rank][line]:
                pairs.append((rank, last[channel], line))
            last[channel] = line
        if not pairs:
            return None
        rank, one, other = draw.choice(pairs)
        lines = records[rank]
        lines[one], lines[other] = lines[other], lines[one]
        return records

    return corrupt


KINDS |= {
    "taken-message-dropped": _drop("take "),
    "sent-message-dropped": _drop("  send |sent_reply "),
    "effect-dropped": _drop("  (?:serve|landed|dropped|abandoned) "),
    "round-dropped": _drop(r"open_round \[\[\""),
    "end-dropped": _drop("end "),
    "taken-message-repeated": _repeat("take "),
    "sent-message-repeated": _repeat("  send |sent_reply "),
    "round-repeated": _repeat("open_round "),
    "access-repeated": _repeat("access "),
    "taken-messages-swapped": _swap(r"take (\d+) "),
    "sent-messages-swapped": _swap(r"(?:  send|sent_reply) (\d+) "),
}


@kind
def done_dropped(records: Records, draw: random.Random) -> Records | None:
    """A rank never says done; where it says so again, the first is the one that counts."""
    spots = [
        (rank, line)
        for rank, line in _spots(records, "say_done ")
        if records[rank].index(records[rank][line]) == line
    ]
    rank, line = draw.choice(spots)
    del records[rank][line]
    return records


@kind
def access_dropped(records: Records, draw: random.Random) -> Records | None:
    """A worker makes an access less; one that failed elsewhere may have got less far."""
    failed = _failed(records)
    spots = [
        (rank, line)
        for rank, line in _spots(records, "access ")
        if json.loads(records[rank][line][7:].rpartition(" = ")[0])[0][0] not in failed
    ]
    if not spots:
        return None
    rank, line = draw.choice(spots)
    del records[rank][line]
    return records


def _failed(records: Records) -> set[str]:
    """The requests of which a worker raised."""
    return {json.loads(records[rank][line][5:])[0][0] for rank, line in _spots(records, "fail ")}


# --- a field of a line ------------------------------------------------------------------------


def _answer(change: Callable[[list], None]) -> Callable[[str], str]:
    """Change what an access was answered."""

    def edit(text: str) -> str:
        call, _, answer = text.rpartition(" = ")
        spelled = json.loads(answer)
        change(spelled)
        return f"{call} = {json.dumps(spelled, separators=(',', ':'))}"

    return edit


def _next_number(answer: list) -> None:
    answer[1][1] += 1


def _other_verdict(answer: list) -> None:
    answer[0] = {"local": "answer", "answer": "gate", "gate": "answer", "never": "local"}[answer[0]]


def _next_place(answer: list) -> None:
    answer[2][1] += 1


def _next_turn(answer: list) -> None:
    answer[2][0] += 1


def _other_owner(answer: list) -> None:
    answer[3] = 1 if answer[3] == 0 else answer[3] - 1


def _location(text: str) -> str | None:
    """Another location, which a forward visits as well."""
    found = re.fullmatch(r'access (\[.*?\]),"([^"]+)",(\d+)\] = (.*)', text)
    if found is None or ".input" not in found[2] and ".output" not in found[2]:
        return None
    path, _, side = found[2].rpartition(".")
    other = f"{path}.{'input' if side == 'output' else 'output'}"
    return f'access {found[1]},"{other}",{found[3]}] = {found[4]}'


def _sim_location(text: str) -> str | None:
    found = re.fullmatch(r'access (\[.*?\]),"(L\d+)\.(in|out)",(.*)', text)
    if found is None:
        return None
    side = "in" if found[3] == "out" else "out"
    return f'access {found[1]},"{found[2]}.{side}",{found[4]}'


def _any_location(text: str) -> str | None:
    return _location(text) or _sim_location(text)


def _higher(text: str) -> str:
    return re.sub(r"= (\d+)$", lambda found: f"= {int(found[1]) + 1}", text)


def _other_expression(text: str) -> str | None:
    spelled = json.loads(text[5:].rpartition(" = ")[0])
    spelled[2] += "+"
    return f"pull {json.dumps(spelled, separators=(',', ':'))} = {text.rpartition(' = ')[2]}"


def _other_key(text: str) -> str:
    spelled = json.loads(text[5:].rpartition(" = ")[0])
    spelled[0][1] += 1
    return f"pull {json.dumps(spelled, separators=(',', ':'))} = {text.rpartition(' = ')[2]}"


def _longer(text: str) -> str | None:
    """Another error's text, or another reason."""
    return text[:-2] + '!"]' if text.endswith('"]') else None


KINDS |= {
    "access-number": _edit(_ACCESS, _answer(_next_number)),
    "verdict": _edit(_ACCESS, _answer(_other_verdict)),
    "place": _edit(_ACCESS, _answer(_next_place)),
    "turn": _edit(_ACCESS, _answer(_next_turn)),
    "owner": _edit(_ACCESS, _answer(_other_owner)),
    "location": _edit("access ", _any_location),
    "pull-number": _edit(r"pull .* = \d+$", _higher),
    "pull-expression": _edit("pull ", _other_expression),
    "pull-key": _edit("pull ", _other_key),
    "error-text": _edit("take .* (?:failed|never) ", _longer),
}


@kind
def round_of_others(records: Records, draw: random.Random) -> Records | None:
    """One rank's round has another request in it, or one less."""
    rank, line = draw.choice(_spots(records, r'open_round \[\["'))
    requests = json.loads(records[rank][line][11:])[0]
    if draw.random() < 0.5:
        requests.pop(draw.randrange(len(requests)))
    else:
        requests.insert(draw.randrange(len(requests) + 1), "nobody")
    records[rank][line] = f"open_round {json.dumps([requests], separators=(',', ':'))}"
    return records


@kind
def rounds_swapped(records: Records, draw: random.Random) -> Records | None:
    """One rank has two rounds the other way round."""
    pairs = [
        (rank, one, other)
        for rank, one in _spots(records, "open_round ")
        for other in range(one + 1, len(records[rank]))
        if records[rank][other].startswith("open_round ")
        and records[rank][one] != records[rank][other]
    ]
    if not pairs:
        return None
    rank, one, other = draw.choice(pairs)
    lines = records[rank]
    lines[one], lines[other] = lines[other], lines[one]
    return records


# --- the same lie on both ends of a channel ---------------------------------------------------


def _channel(records: Records) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """(from, to, lines there, lines here) of every channel, message by message."""
    for source in range(len(records)):
        for target in range(len(records)):
            sent = [n for _, n in _spots([records[source]], rf"(?:  send|sent_reply) {target} ")]
            taken = [n for _, n in _spots([records[target]], rf"take {source} ")]
            yield source, target, sent, taken


def _messages(records: Records, word: str) -> list[tuple[int, int, int, int]]:
    """(from, to, line there, line here) of every message of a kind."""
    return [
        (source, target, out, into)
        for source, target, sent, taken in _channel(records)
        for out, into in zip(sent, taken, strict=True)
        if f" {word} [" in records[source][out]
    ]


@kind
def reply_to_another_pull(records: Records, draw: random.Random) -> Records | None:
    """A reply has another number, on both sides and in what landed."""
    spots = _messages(records, "reply")
    if not spots:
        return None
    source, target, out, into = draw.choice(spots)
    for rank, line in ((source, out), (target, into), (target, into + 1)):
        records[rank][line] = re.sub(
            r"\[(\d+)", lambda found: f"[{int(found[1]) + 1}", records[rank][line]
        )
    return records


@kind
def release_of_nothing(records: Records, draw: random.Random) -> Records | None:
    """A rank releases what it never named, and its owner takes that."""
    spots = _messages(records, "done")
    source, target, out, into = draw.choice(spots)
    [request] = json.loads(records[source][out].partition(" done ")[2])
    while not records[source][out].startswith("say_done "):
        out -= 1
    key = json.dumps([request, "", 7000 + draw.randrange(1000)], separators=(",", ":"))
    worker = json.loads(key)
    named = json.dumps([[[target, [worker[:2], worker[2]]]]], separators=(",", ":"))
    records[source][out:out] = [f"release {named}", f"  send {target} release [[{key}]]"]
    records[target].insert(into, f"take {source} release [[{key}]]")
    return records


@kind
def held_text(records: Records, draw: random.Random) -> Records | None:
    """Another stage ships a leaf than the ranks agreed on: said, sent and taken alike."""
    failed = _failed(records)
    spots = [
        (rank, line)
        for rank, line in _spots(records, "say_held ")
        if json.loads(records[rank][line][9:])[0] not in failed
        and re.search(r'\\"[01]+\\"', records[rank][line])
    ]
    if not spots:
        return None
    rank, line = draw.choice(spots)
    old = records[rank][line][9:]
    bits = draw.choice(list(re.finditer(r'(?<=: \\")[01]+(?=\\")', old)))
    at = draw.randrange(*bits.span())
    new = old[:at] + ("0" if old[at] == "1" else "1") + old[at + 1 :]
    spelled = {f"say_held {old}": f"say_held {new}"}
    for peer in range(len(records)):
        spelled[f"  send {peer} held {old}"] = f"  send {peer} held {new}"
    for number, lines in enumerate(records):
        if number == rank:
            lines[:] = [spelled.get(text, text) for text in lines]
        else:
            taken = f"take {rank} held "
            lines[:] = [taken + new if text == taken + old else text for text in lines]
    return records


@kind
def message_from_nowhere(records: Records, draw: random.Random) -> Records | None:
    """A rank takes what nobody sent."""
    rank, line = draw.choice(_spots(records, "(?:take|open_round|end|say_done) "))
    peer = draw.choice([other for other in range(len(records)) if other != rank])
    message = draw.choice(
        [
            'done ["nobody"]',
            'held ["nobody","{}"]',
            'release [[["nobody","",0]]]',
            "reply [4000]",
            'never [4001,"unreachable: nobody said so"]',
        ]
    )
    records[rank].insert(line, f"take {peer} {message}")
    return records


# --- order ------------------------------------------------------------------------------------


@kind
def done_before_the_last_pull(records: Records, draw: random.Random) -> Records | None:
    """A rank says done where its worker still makes accesses, and takes nothing back."""
    spots: list[tuple[int, int, int]] = []
    for rank, line in _spots(records, "say_done "):
        request = records[rank][line][9:]
        if records[rank].index(records[rank][line]) < line:
            continue
        wanted = rf"(?:access|again|pull) \[+{re.escape(request[1:-1])},"
        spots += [
            (rank, line, other)
            for r, other in _spots(records, wanted)
            if r == rank and other < line
        ]
    if not spots:
        return None
    rank, line, before = draw.choice(spots)
    lines = records[rank]
    end = line + 1
    while lines[end].startswith("  "):
        end += 1
    moved = lines[line:end]
    del lines[line:end]
    lines[before:before] = moved
    return records


# --- whole files ------------------------------------------------------------------------------


@kind
def cut(records: Records, draw: random.Random) -> Records | None:
    """A record stops at some line."""
    lines = draw.choice(records)
    del lines[draw.randrange(1, len(lines)) :]
    return records


@kind
def cut_and_closed(records: Records, draw: random.Random) -> Records | None:
    """A record stops before its last message and is closed all the same."""
    rank = draw.randrange(len(records))
    last = max(line for r, line in _spots(records, "take |  send ") if r == rank)
    del records[rank][draw.randrange(1, last + 1) :]
    records[rank].append("close []")
    return records


@kind
def one_rank_missing(records: Records, draw: random.Random) -> Records | None:
    """There is no record of one rank."""
    records.pop(draw.randrange(len(records)))
    return records


@kind
def one_rank_twice(records: Records, draw: random.Random) -> Records | None:
    """There are two records of one rank."""
    records.append(list(draw.choice(records)))
    return records


@kind
def other_rank(records: Records, draw: random.Random) -> Records | None:
    """A record says that it is another rank's."""
    lines = draw.choice(records)
    stage = int(re.search(r'"stage":(\d+)', lines[0])[1])  # type: ignore[index]
    lines[0] = lines[0].replace(f'"stage":{stage}', f'"stage":{(stage + 1) % len(records)}')
    return records


@kind
def other_schedule(records: Records, draw: random.Random) -> Records | None:
    """A rank has two visits of its stage the other way round."""
    lines = draw.choice(records)
    fields = json.loads(lines[0].partition(" ")[2].partition(" ")[2])
    visits = draw.choice([found for found in fields["visits"] if len(found) > 1])
    at = draw.randrange(len(visits) - 1)
    visits[at], visits[at + 1] = visits[at + 1], visits[at]
    words = lines[0].split(" ", 2)[:2]
    lines[0] = " ".join([*words, json.dumps(fields, separators=(",", ":"))])
    return records


@kind
def not_a_record(records: Records, draw: random.Random) -> Records | None:
    """A line is cut in two."""
    lines = draw.choice(records)
    line = draw.randrange(len(lines))
    at = draw.randrange(1, len(lines[line]))
    lines[line : line + 1] = [lines[line][:at], lines[line][at:]]
    return records


def mixed(records: Records, others: Records, draw: random.Random) -> Records:
    """One rank's record is of another run, whose requests have other names."""
    rank = draw.randrange(len(records))
    records[rank] = list(others[rank])
    return records
