"""What has to hold of a run's records; `ppsim.conform` has the list.

Each property is a function from a run to where it does not hold. All but `replay`, and the last
lines of `rest`, read the text alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest

from ppcore.core import END, STATIC, Available, Core
from ppcore.messages import (
    Call,
    Done,
    Failed,
    Held,
    Key,
    Message,
    Pull,
    Pulls,
    Release,
    Worker,
    pulls_of,
)
from ppcore.record import Recorder, perform
from ppcore.schedule import BEFORE, Place

from .channels import answers, calls, fifo, once, release
from .records import Finding, Record, Run, Step, named, short, spelled_key

Findings = Iterator[Finding]


# --- each rank by itself, and a core ----------------------------------------------------------


def whole(run: Run) -> Findings:
    seen: dict[tuple[int, int], str] = {}
    for record in run.records:
        header, first = record.header, run.records[0].header
        rank = (header.stage, header.column)
        if rank in seen:
            yield record.finding("whole", 1, f"rank {rank} has a record already: {seen[rank]}")
        seen[rank] = record.file
        if (header.visits, header.homes) != (first.visits, first.homes):
            other = run.records[0].file
            yield record.finding("whole", 1, f"of another model, or layout, than {other}")
        closes = [step.line for step in record.steps if step.event.word == "close"]
        if not record.closed:
            last = record.steps[-1].line + len(record.steps[-1].effects) if record.steps else 1
            yield record.finding(
                "whole", last, "ends without close: the rank was stopped, or the file is cut"
            )
        if len(closes) > 1:
            yield record.finding("whole", closes[0], "something follows the close")
    columns = sorted({column for _, column in seen})
    for record in run.records[:1]:
        for rank in ((s, c) for c in columns for s in range(record.header.stages)):
            if rank not in seen:
                yield record.finding("whole", 1, f"there is no record of rank {rank}")


def replay(run: Run) -> Findings:
    for record in run.records:
        yield from _replay(record)[0]


def _replay(record: Record) -> tuple[list[Finding], Core]:
    """Where a core departs from a record, and the core after the last event that it could do."""
    said: list[str] = []
    header = record.header
    core = Recorder(header.stage, record.schedule, header.homes, said.append, header.column)
    for step in record.steps:
        said.clear()
        try:
            perform(core, step.event)
        except Exception as error:
            why = f"a core cannot do this: {type(error).__name__}: {error}"
            return [record.finding("replay", step.line, why)], core
        written = [step.text, *(f"  {effect}" for effect in step.effects)]
        for line, (found, due) in enumerate(zip_longest(written, said), step.line):
            if found != due:
                text = f"expected {short(due)}, found {short(found)}"
                return [record.finding("replay", line, text)], core
    return [], core


# --- what all ranks do alike ------------------------------------------------------------------


def rounds(run: Run) -> Findings:
    def of(record: Record) -> list[Step]:
        return [step for step in record.steps if step.event.word == "open_round"]

    longest = max(run.records, key=lambda record: len(of(record)))
    for record in run.records:
        for number, (mine, other) in enumerate(zip_longest(of(record), of(longest))):
            if mine is None:
                if record.closed:
                    text = f"round {number} of {longest.file}:{other.line} never opened here"
                    yield record.finding("rounds", record.steps[-1].line, text)
                break
            if mine.text != other.text:
                text = f"round {number} is {other.text!r} in {longest.file}:{other.line}"
                yield record.finding("rounds", mine.line, text)
                break


def names(run: Run) -> Findings:
    first: dict[Key, tuple[object, str]] = {}
    counts: dict[Worker, tuple[int, str]] = {}
    failed = {
        step.event.args[0].request
        for record in run.records
        for step in record.steps
        if step.event.word == "fail"
    }
    for record in run.records:
        following: dict[Worker, int] = {}
        touched: dict[Key, str] = {}
        for step in record.steps:
            event = step.event
            if event.word in ("pull", "publish", "give") and event.args[0].access != STATIC:
                key, location = event.args[:2]
                if touched.get(key) != location:
                    text = f"{event.word} of {location!r} as {key}, which is {touched.get(key)!r}"
                    yield record.finding("names", step.line, text)
            if event.word == "start":
                following[event.args[0]] = 0
            if event.word not in ("access", "call") or not isinstance(event.answer, list):
                continue
            key = spelled_key(event.answer[1 if event.word == "access" else 0])
            touched[key] = event.args[1]
            due = following.get(event.args[0], 0)
            following[event.args[0]] = due + 1
            if key != Key(event.args[0], due):
                text = f"expected access {Key(event.args[0], due)}, found {key}"
                yield record.finding("names", step.line, text)
                continue
            # Which visit of a location that no forward visits is meant, nothing says.
            location = event.args[1]
            what = event.args[1:] if location in record.schedule else (location,)
            other, where = first.setdefault(key, (what, f"{record.file}:{step.line}"))
            if what != other:
                text = f"access {key} is {what!r} here and {other!r} in {where}"
                yield record.finding("names", step.line, text)
        # Where a block was not ended by its error on one rank, it came as far on every rank.
        for worker, count in following.items():
            number, where = counts.setdefault(worker, (count, record.file))
            if record.closed and worker.request not in failed and count != number:
                text = f"{worker} made {count} accesses here and {number} in {where}"
                yield record.finding("names", record.steps[-1].line, text)


def places(run: Run) -> Findings:
    for record in run.records:
        turns: dict[str, int] = {}
        clocks: dict[Worker, Place] = {}
        asked: dict[Key, tuple[str, int]] = {}
        # What each worker asked for last, and was served last.
        stands: dict[Worker, Place] = {}
        served: dict[Worker, Place] = {}
        left = False
        for step in record.steps:
            word, args, answer = step.event
            if word in ("open_round", "leave_round"):
                left = word == "leave_round"
            if word == "served" and left and args[1].turn != END:
                text = f"{args[0]} is served a visit by a forward that is over"
                yield record.finding("places", step.line, text)
            if word == "open_round":
                for request in args[0]:
                    turns[request] = turns.get(request, 0) + 1
            elif word == "start":
                clocks[args[0]] = Place(max(0, turns.get(args[0].request, 0) - 1), BEFORE)
            elif word == "served":
                worker, place = args
                if place < clocks.get(worker, place) or place != stands.get(worker):
                    text = f"served at {place}, with {worker} at {clocks.get(worker)}, which asks "
                    yield record.finding("places", step.line, f"{text}for {stands.get(worker)}")
                clocks[worker] = served[worker] = place
            elif word == "publish" and args[1] in record.schedule and args[0] in asked:
                due = record.schedule.place(*asked[args[0]])
                if served.get(args[0].worker) != due:
                    yield record.finding("places", step.line, f"{args[0]} was not served")
            elif word == "call" and not args[3]:
                turn, index = clocks.get(args[0], (0, BEFORE))
                _, caller, home, _ = answer
                if turn != END and caller != record.schedule.stage_of(index):
                    text = f"stage {caller} makes a call of {args[0]}, which is at {(turn, index)}"
                    yield record.finding("places", step.line, text)
                if caller in args[2] and home != caller or home not in args[2]:
                    text = f"stage {home} is no home of {args[1]!r}"
                    yield record.finding("places", step.line, text)
            elif word in ("access", "again"):
                verdict, key, place, owner = answer
                location, occurrence = args[1:]
                name = spelled_key(key)
                stands[name.worker] = Place(*place)
                if asked.setdefault(name, args[1:]) != args[1:]:
                    text = f"{name} is {asked[name]!r}"
                    yield record.finding("places", step.line, text)
                if location not in record.schedule:
                    continue
                due = visit = record.schedule.place(location, occurrence)
                if location.endswith(".skip") and verdict != "never":
                    # It leaves the worker where the skipped module's output is.
                    due = record.schedule.beyond(location, visit)
                stage = record.schedule.owner(location, occurrence)
                place = Place(*place)
                clock = clocks.get(name.worker, place)
                wrong = {
                    "local": owner != record.stage or visit < clock,
                    "answer": owner == record.stage
                    or visit < clock
                    or place.turn >= turns.get(name.worker.request, 0),
                    "gate": owner == record.stage or visit < clock,
                    "never": visit >= clock,
                }[verdict]
                if wrong or place != due or owner != stage:
                    text = (
                        f"{verdict} for {due} of stage {stage}, with the worker at {clock} and "
                        f"{turns.get(name.worker.request, 0)} turns open"
                    )
                    yield record.finding("places", step.line, text)
                if verdict == "answer":
                    clocks[name.worker] = place


def waits(run: Run) -> Findings:
    for record in run.records:
        opened: dict[str, list[int]] = {}
        ended: set[str] = set()
        pulls: dict[int, tuple[Key, Available]] = {}
        landed: set[int] = set()
        places = {key: (step, owner) for step, key, owner in named(record)}
        calls = {
            key: Available(*step.event.answer[3])
            for key, (step, _) in places.items()
            if step.event.word == "call"
        }
        now, stands = -1, record.stage
        for step in record.steps:
            word, args, answer = step.event
            for effect in step.effects:
                if effect.startswith("landed ["):
                    landed.add(int(effect[8:].partition(",")[0]))
            if word == "open_round":
                now, stands = now + 1, record.stage
                for request in args[0]:
                    opened.setdefault(request, []).append(now)
            elif word == "leave_round":
                stands = record.header.stages
            elif word == "end":
                ended.add(args[0])
            elif word == "pull":
                key, available = args[0], args[4]
                pulls[answer] = (key, available)
                access, owner = places.get(key, (None, args[3]))
                due = access.event.answer[2][0] if access and access.event.word != "call" else None
                late = available != calls.get(key, available)
                if (
                    args[3] != owner
                    or late
                    or (due is not None and available != Available(due, owner))
                ):
                    text = f"{key} is to be had of stage {owner} in turn {due}"
                    yield record.finding("waits", step.line, text)
            elif word == "wait":
                for number in set(args[0]) - landed:
                    key, when = pulls.get(number, (None, None))
                    if key is None or when is None or when.turn < 0 or key.worker.request in ended:
                        continue
                    turns = opened.get(key.worker.request, [])
                    if when.turn < len(turns):
                        place = (turns[when.turn], when.stage)
                        if place < (now, stands):
                            continue
                    text = f"stage {record.stage} waits in round {now} for {when} of {key}"
                    yield record.finding("waits", step.line, text)


# --- the end of a request ---------------------------------------------------------------------

#: Events that come before a request's done, and where they name it.
_BEFORE_DONE: Mapping[str, Callable[[Step], list[str]]] = {
    "open_round": lambda step: step.event.args[0],
    **dict.fromkeys(("start", "access", "served", "call", "fail"), lambda s: [s.event.args[0].request]),
    **dict.fromkeys(("again", "pull", "publish", "give"), lambda s: [s.event.args[0].worker.request]),
    **dict.fromkeys(("end", "say_held"), lambda step: [step.event.args[0]]),
}  # fmt: skip


def ends(run: Run) -> Findings:
    for record in run.records:
        ended: set[str] = set()
        done: dict[str, int] = {}
        for step in record.steps:
            word, args, _ = step.event
            named = _BEFORE_DONE[word](step) if word in _BEFORE_DONE else []
            for request in named:
                if request in done:
                    text = f"{word} of {request!r}, which was done: line {done[request]}"
                    yield record.finding("ends", step.line, text)
                elif request in ended and word == "open_round":
                    yield record.finding("ends", step.line, f"a round of {request!r} after its end")
            if word == "end":
                ended.add(args[0])
            elif word == "say_done" and args[0] not in done:
                done[args[0]] = step.line
                if args[0] not in ended:
                    yield record.finding("ends", step.line, f"{args[0]!r} has not ended")
        for peer, channel in record.sent.items():
            over: set[str] = set()
            for said in channel:
                for request in _requests(said.message) & over:
                    text = f"stage {peer} is told of {request!r} after its done"
                    yield record.finding("ends", said.line, text)
                if isinstance(said.message, Done):
                    over.add(said.message.request)


def _requests(message: Message) -> set[str]:
    """The requests that a message names."""
    match message:
        case Pull() | Pulls():
            return {pull.key.worker.request for pull in pulls_of(message)}
        case Call(key):
            return {key.worker.request}
        case Release(keys):
            return {key.worker.request for key in keys}
        case Failed(worker):
            return {worker.request}
        case Held(request) | Done(request):
            return {request}
    return set()


def ships(run: Run) -> Findings:
    for column in run.columns():
        # Request -> for each stage that said what it ships: where, what, and whom it had heard.
        said: dict[str, list[tuple[int, Record, int, str, set[int]]]] = {}
        failed: set[str] = set()
        for stage, record in sorted(column.items()):
            heard: dict[str, set[int]] = {}
            for step in record.steps:
                match step.event:
                    case ("say_held", (request, leaves), _):
                        known = set(heard.get(request, ()))
                        said.setdefault(request, []).append(
                            (stage, record, step.line, leaves, known)
                        )
                    case ("take", (peer, Held(request)), _):
                        heard.setdefault(request, set()).add(peer)
                    case ("fail", (worker, _), _):
                        failed.add(worker.request)
        for request, stages in said.items():
            complete = request not in failed and len(stages) == len(column)
            yield from _shipped(request, stages, complete)


def _shipped(
    request: str, stages: list[tuple[int, Record, int, str, set[int]]], complete: bool
) -> Findings:
    """Where a leaf is shipped twice, or not at all though every stage said what it ships."""
    shippers: dict[tuple[str, int], list[int]] = {}
    widths: dict[str, int] = {}
    for position, (stage, record, line, leaves, heard) in enumerate(stages):
        try:
            bitmaps = {str(name): str(bits) for name, bits in json.loads(leaves).items()}
        except (AttributeError, ValueError):
            yield record.finding("ships", line, f"not the leaves of {request!r}: {leaves!r}")
            continue
        mine = {name: len(bits) for name, bits in bitmaps.items()}
        if complete and mine != (widths if position else mine):
            text = f"{request!r} saved {mine} here and {widths} on earlier stages"
            yield record.finding("ships", line, text)
        widths = mine
        for leaf in ((name, at) for name, bits in bitmaps.items() for at in range(len(bits))):
            found = shippers.setdefault(leaf, [])
            if bitmaps[leaf[0]][leaf[1]] == "1":
                if heard & set(found):
                    text = f"leaf {leaf} of {request!r} is shipped by stage {found[0]} already"
                    yield record.finding("ships", line, text)
                found.append(stage)
    if complete:
        _, record, line, _, _ = stages[-1]
        for leaf in (leaf for leaf, found in shippers.items() if not found):
            text = f"leaf {leaf} of {request!r} is shipped by no stage"
            yield record.finding("ships", line, text)


def rest(run: Run) -> Findings:
    for record in run.records:
        if not record.closed:
            continue
        line = record.steps[-1].line
        began = {
            name
            for step in record.steps
            if step.event.word == "open_round"
            for name in step.event.args[0]
        }
        dropped = [
            json.loads(effect[8:])[0]
            for step in record.steps
            for effect in step.effects
            if effect.startswith("dropped ")
        ]
        for name in sorted(began - set(dropped)):
            yield record.finding("rest", line, f"{name!r} is not dropped")
        for name in {name for name in dropped if dropped.count(name) > 1}:
            yield record.finding("rest", line, f"{name!r} is dropped twice")
        departed, core = _replay(record)
        if departed:
            continue
        left = {
            "requests": core.requests,
            "pulls": core.pending(),
            "values": core.buffered()[0],
        }
        if any(left.values()):
            yield record.finding("rest", line, f"left in the core: {left}")


#: Every property, by name.
PROPERTIES: Mapping[str, Callable[[Run], Findings]] = {
    check.__name__: check
    for check in (
        whole, replay, fifo, rounds, names, places, waits, answers, once, calls, release, ends, ships, rest
    )
}  # fmt: skip
