"""What has to hold of the messages between ranks, read from the text of their records alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from ppcore.messages import Call, Key, Message, Never, Probe, Release, Reply, pulls_of

from .records import Finding, Run, named, short, spelled_key

Findings = Iterator[Finding]


def fifo(run: Run) -> Findings:
    for sender in run.records:
        column = run.column(sender)
        for peer in range(sender.header.stages):
            taker = column.get(peer)
            if taker is None or taker is sender:
                continue
            sent, taken = sender.sent.get(peer, []), taker.taken.get(sender.stage, [])
            broken = sender.stage in taker.bereft or peer in sender.bereft
            for out, into in zip_longest(sent, taken):
                if out is None:
                    text = f"{into.text!r} was never sent by stage {sender.stage}"
                    yield taker.finding("fifo", into.line, text)
                elif into is None:
                    if taker.closed and not broken:
                        text = f"{out.text!r} was never taken by stage {peer}"
                        yield sender.finding("fifo", out.line, text)
                elif out.text != into.text:
                    where = f"{sender.file}:{out.line}"
                    text = f"expected {short(out.text)} ({where}), found {short(into.text)}"
                    yield taker.finding("fifo", into.line, text)
                else:
                    continue
                break
        for peer in {*sender.sent, *sender.taken} - set(column):
            yield sender.finding("fifo", 1, f"speaks with stage {peer}, of which nothing is known")


def answers(run: Run) -> Findings:
    for asker in run.records:
        for peer, owner in run.column(asker).items():
            asked: dict[int, int] = {}
            for said in asker.sent.get(peer, []):
                for number in _numbers(said.message):
                    if number in asked:
                        text = f"number {number} is asked for twice"
                        yield asker.finding("answers", said.line, text)
                    asked[number] = said.line
            came = {
                number: said.line
                for said in owner.taken.get(asker.stage, [])
                for number in _numbers(said.message)
            }
            answered: set[int] = set()
            for said in owner.sent.get(asker.stage, []):
                if isinstance(said.message, Reply | Never):
                    number = said.message.number
                    if number not in asked or came.get(number, said.line) >= said.line:
                        text = f"number {number} is answered, which was not asked for"
                        yield owner.finding("answers", said.line, text)
                    elif number in answered:
                        yield owner.finding(
                            "answers", said.line, f"number {number} is answered twice"
                        )
                    answered.add(number)
            if owner.closed and peer not in asker.bereft and asker.stage not in owner.bereft:
                for number in asked.keys() - answered:
                    text = f"number {number} was never answered by stage {peer}"
                    yield asker.finding("answers", asked[number], text)


def _numbers(message: Message) -> list[int]:
    """The numbers under which a message asks."""
    if isinstance(message, Probe):
        return [message.number]
    return [pull.number for pull in pulls_of(message)]


def once(run: Run) -> Findings:
    for record in run.records:
        asked: dict[Key, set[tuple[str, str]]] = {}
        sent = {said.step: said for channel in record.sent.values() for said in channel}
        for position, step in enumerate(record.steps):
            if step.event.word == "forget":
                asked.pop(step.event.args[0], None)
            for pull in pulls_of(sent[position].message) if position in sent else ():
                names = asked.setdefault(pull.key, set())
                name = (pull.location, pull.expression)
                if name in names:
                    text = f"{pull.key} {name[1]!r} crosses again"
                    yield record.finding("once", step.line, text)
                names.add(name)


def calls(run: Run) -> Findings:
    for record in run.records:
        due: dict[Key, tuple[str, int, int]] = {}
        given: dict[Key, int] = {}
        taken: dict[Key, tuple[str, int]] = {}
        computed: dict[Key, int] = {}
        # The calls that the core has asked to compute.
        asked: dict[Key, int] = {}
        for step in record.steps:
            word, args, answer = step.event
            if word == "call" and isinstance(answer, list):
                key, caller, home, _ = answer
                due[spelled_key(key)] = args[1], caller, home
            elif word == "give":
                key, path, home = args[:3]
                for other in args[5]:
                    if other not in given or due[other][2] != home:
                        text = f"{key} is to be computed of {other}, which is not at stage {home}"
                        yield record.finding("calls", step.line, text)
                if due.get(key) != (path, record.stage, home):
                    text = f"{path!r} of stage {home} is given as {key}, which is {due.get(key)}"
                    yield record.finding("calls", step.line, text)
                if key in given:
                    text = f"{key} was given before: line {given[key]}"
                    yield record.finding("calls", step.line, text)
                given[key] = step.line
            elif word == "take" and isinstance(args[1], Call):
                taken[args[1].key] = args[1].location, step.line
                if step.effects:
                    asked[args[1].key] = step.line
            elif word == "computed":
                key, path = args[:2]
                if taken.get(key, ("", 0))[0] != path or key in computed:
                    text = f"{path!r} is computed as {key}, which was not given so, or is computed"
                    yield record.finding("calls", step.line, text)
                computed[key] = step.line
            elif word == "pull" and args[0] in due and args[4].turn < 0 and args[0] not in given:
                # Whatever is to be had at any time is under way already.
                text = f"{args[0]} was not given to stage {args[3]} before"
                yield record.finding("calls", step.line, text)
        for key in asked.keys() - computed.keys() if record.closed else ():
            yield record.finding("calls", asked[key], f"{key} was never computed")


def release(run: Run) -> Findings:
    for record in run.records:
        owners = {key: owner for _, key, owner in named(record)}
        released: dict[Key, int] = {}
        for peer, channel in record.sent.items():
            for said in channel:
                for pull in pulls_of(said.message):
                    if pull.key in released:
                        text = f"{pull.key} was released: line {released[pull.key]}"
                        yield record.finding("release", said.line, text)
                if not isinstance(said.message, Release):
                    continue
                for key in said.message.keys:
                    if owners.get(key) != peer:
                        text = f"{key} is no value of stage {peer} that this rank has named"
                        yield record.finding("release", said.line, text)
                    elif key in released:
                        text = f"{key} was released before: line {released[key]}"
                        yield record.finding("release", said.line, text)
                    released[key] = said.line
