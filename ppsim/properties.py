"""What must hold, by name.

=================  ============================================================================
``sameness``       saves, tokens, error and how each block ended are those of a single rank
``ends``           every request ends; a hang prints who waits for whom
``wait-rule``      a forward waits only for a place strictly smaller than its own (round, stage)
``ripe``           a block goes on with a value only once its rank may wait for it: what it can still
                   do in a step does not depend on when an answer came
``rest``           when everything has ended, nothing is left of it on any rank
``bounded``        a value stays published only while a peer may still ask for it
``once``           a value crosses to a rank at most once for each expression, and a saved one
                   comes home from one stage
``columns-agree``  the columns of a stage gather the same values
``dead-ends``      a rank that dies ends every wait (``ends``, in a run with a death)
``told``           a block that ends with an error on one rank tells every other, before that rank
                   is done; one that hears of it ends the block in the round that it is in
``deadline``       a wait that outlasts its deadline says which rank waits, in which round, and
                   what for
=================  ============================================================================

Faults change what must hold as little as they have to. A link that stalls changes nothing. A request
whose client goes away leaves nothing. A block that raises on one rank, and a wait that outlasts its
deadline, end their own request with that error, and no other. With several columns a block that
raises on one rank alone runs differently from its copy in the other column; the gathers of the two
do not match then, on one stage as on several, and the run ends there
([`unexcused`][ppsim.properties.Properties.unexcused]).

Each is checked at the first event at which it can be seen. Places come from the engine's own record
of rounds, so that a core that misjudges a wait is found out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ppcore.messages import Done, Failed, Key, Message, Pull, Pulls, Worker, pulls_of

from .cases import Request
from .failures import Failure, Leak, Liveness, Sameness
from .oracle import Expected, expect
from .terms import explain

if TYPE_CHECKING:
    from ppcore.saves import Merged, Shipment

    from .link import Link
    from .rank import Rank
    from .world import World


#: The shapes of what was saved, which a skeleton spells.
_shapes: Callable[[bytes], dict[str, str]] = lru_cache(maxsize=256)(json.loads)

#: The messages of which a check depends.
CHECKED = frozenset({Pull, Pulls, Failed, Done})


class Properties:
    """The checks of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._pulled: set[tuple[int, int, int, object, str, str]] = set()
        self._told: set[tuple[int, int, int, Worker]] = set()
        # Rank -> workers that have failed elsewhere, as it knew when its forward was through.
        self._failed: dict[tuple[int, int], list[Worker]] = {}
        # Requests (their parents) of which a wait outlasted its deadline.
        self._late: set[str] = set()

    # --- while it runs ------------------------------------------------------------------------

    def sent(self, stage: int, column: int, peer: int, message: Message) -> None:
        """A message of a kind that is ``CHECKED`` goes out.

        ``once``: nobody asks for the same thing twice. ``told``: see there.
        """
        if type(message) is Pull or type(message) is Pulls:
            for pull in pulls_of(message):
                name = (stage, column, peer, pull.key, pull.location, pull.expression)
                if name in self._pulled:
                    raise Leak("once", f"stage {stage} pulls {pull.key} twice")
                self._pulled.add(name)
        elif type(message) is Failed:
            self._told.add((stage, column, peer, message.worker))
        elif type(message) is Done:
            self._told_of(self.world.rank(stage, column), peer, message.request)

    def _told_of(self, rank: Rank, peer: int, request: str) -> None:
        for block, how in rank.endings.get(request, {}).items():
            if ":" not in how:
                continue
            worker = Worker(request, block)
            told = worker in rank.link.abandoned
            if not told and (rank.stage, rank.column, peer, worker) not in self._told:
                raise Liveness(
                    "told", f"stage {rank.stage} is done, and has not told stage {peer} of {how!r}"
                )

    def blocks(self, link: Link, numbers: list[int]) -> None:
        """``wait-rule``: the forward of a rank blocks for these pulls."""
        for number in numbers:
            if number in link.core._asked and not self._smaller(link, number):
                request, when = link.origins[number]
                raise Liveness(
                    "wait-rule",
                    f"stage {link.stage} in round {link.core.round} waits for turn {when.turn} "
                    f"of {request!r} on stage {when.stage}",
                )

    def takes(self, link: Link, numbers: list[int]) -> None:
        """``ripe``: the forward of a rank goes on with the answers to these pulls."""
        for number in numbers:
            if number in link.landed and not self._smaller(link, number):
                request, when = link.origins[number]
                if when.stage in link.core.dead:
                    continue  # nothing better can come, and the engine ends
                raise Liveness(
                    "ripe",
                    f"stage {link.stage} in round {link.core.round} goes on with a value that it "
                    f"can count on after turn {when.turn} of {request!r} on stage {when.stage}",
                )

    def _smaller(self, link: Link, number: int) -> bool:
        """Whether the place of what a pull asks for is strictly smaller than its rank's own."""
        request, when = link.origins[number]
        state = link.core._requests.get(request)
        if when.turn < 0 or state is None or state.ended:
            return True
        rounds = self.world.engine.progress[request].rounds
        if when.turn >= len(rounds):
            return False
        rank = self.world.rank(link.stage, link.column)
        stands = self.world.case.stages if rank.between else link.stage
        return (rounds[when.turn], when.stage) < (link.core.round, stands)

    def ships(self, rank: Rank, label: str) -> None:
        """``once``: only the last stage brings what it ships; the others ship what they hold."""
        if not rank.last:
            raise Leak("once", f"stage {rank.stage} pulls {label!r} to ship it")

    def home(self, name: str, shipments: Sequence[Shipment]) -> None:
        """``once``: every stage has shipped its share of a request's saves."""
        if self.world.engine.dead:
            return  # what the dead had shipped counts for nothing
        shipped = [leaf for shipment in shipments for leaf in shipment.leaves]
        twice = sorted({leaf for leaf in shipped if shipped.count(leaf) > 1})
        if twice:
            raise Leak("once", f"several stages ship {twice} of {name!r}")

    def expired(self, link: Link, request: str, text: str) -> None:
        """``deadline``: a wait of a rank ended by its deadline, with this report."""
        self._late.add(self.world.requests[request].name)
        core = link.core
        asked = [
            a for n, a in core._asked.items() if a.available.turn >= 0 and n not in core._ahead
        ]
        wanted = [f"stage {link.stage} (round {link.core.round})"]
        wanted += [f"turn {a.available.turn}" for a in asked]
        wanted += [f"from stage {a.owner}" for a in asked]
        for part in wanted:
            if part not in text:
                raise Liveness("deadline", f"the report does not say {part!r}: {text}")

    def unexcused(self, failure: Failure) -> Failure | None:
        """The failure, unless the case's fault may lead to it.

        Where a block raised in one column alone, by a fault or because a rank of that column died, the
        columns of its stage gather different values, or one waits for the other: nothing on a rank can
        know of that before the gather.
        """
        if failure.name not in ("columns-agree", "ends", "dead-ends"):
            return failure
        case = self.world.case
        parted = any(self._raised(fault.kind, fault.request, case.columns) for fault in case.faults)
        return None if parted and case.columns > 1 else failure

    def _raised(self, kind: str, request: str, columns: int) -> bool:
        """Whether a block has raised by such a fault, on a rank of the first columns."""
        word = {"raise": "fault", "die": "PeerDied"}.get(kind)
        names = self.world.sequences(request) if request else self.world.engine.progress
        for rank in (r for r in self.world.ranks.values() if r.column < columns):
            for name in names:
                hows = list(rank.endings.get(name, {}).values())
                hows += [worker.how for worker in rank.carried.get(name, ())]
                if word and any(word in how for how in hows):
                    return True
        return False

    def passed(self, rank: Rank) -> None:
        """A rank's forward is through with its stage; what it knows by now is not for the next."""
        link = rank.link
        if link.abandoned:
            # By name: to keep a worker would keep its lazies.
            self._failed[rank.stage, rank.column] = [
                worker.worker
                for workers in rank.carried.values()
                for worker in workers
                if worker.started
                and worker.exception is None
                and link.ended_elsewhere(worker.worker) is not None
            ]

    def closed(self, rank: Rank) -> None:
        """A round is over. ``bounded``: nothing is published here that nobody can ask for, and no answer
        kept that nobody here looks at. ``told``: what had failed elsewhere, as this rank knew, has ended
        here."""
        failed = self._failed.pop((rank.stage, rank.column), ())
        for worker in (w for name in failed for w in rank.carried.get(name.request, ())):
            if worker.worker in failed and worker.exception is None:
                raise Liveness(
                    "told",
                    f"stage {rank.stage} was told that {worker.worker} failed, and runs it on",
                )
        if rank.link.lost:
            raise Leak("bounded", f"stage {rank.stage} keeps releases to itself: {rank.link.lost}")
        for name, state in rank.core._requests.items():
            for key, entry in state.buffer.items():
                for peer in entry.peers:
                    if self._may_ask(rank, peer, name, key):
                        break
                else:
                    raise Leak(
                        "bounded", f"stage {rank.stage} keeps {entry.location!r} ({key}) for nobody"
                    )
        for number, landed in rank.core._ahead.items():
            if landed is None or landed.reason is not None:
                continue
            message = rank.core._pulled[number].message
            assert isinstance(message, Pull)
            key = message.key
            past = rank.core.reached(key.worker, key.access)
            if past and not self._looks_at(rank, key):
                raise Leak("bounded", f"stage {rank.stage} keeps the answer to {key} for nobody")

    def _may_ask(self, rank: Rank, peer: int, name: str, key: Key) -> bool:
        other = self.world.rank(peer, rank.column)
        state = other.core._requests.get(name)
        if (peer, rank.column) in self.world.dead or name not in other.known:
            return True
        if state is None or state.said_done:
            return self._under_way(rank, peer)
        worker = state.workers.get(key.worker.block)
        if worker is None or worker.next_access <= key.access:
            # A block that ended early on that rank alone ends the request; its values may stay so long.
            return True
        if self.world.dead and key.worker in other.link.abandoned:
            # The rank that raised would be excused so; it is gone, and what it said holds on.
            return True
        if self._looks_at(other, key):
            return True
        if any(lost == key for _, lost, _ in other.link.lost):
            return True
        return self._under_way(rank, peer)

    def _looks_at(self, rank: Rank, key: Key) -> bool:
        """Whether the rank's worker has this access's value, or is parked on it."""
        if key in rank.link.live:
            return True
        last = not rank.core.reached(key.worker, key.access + 1)
        for seated in rank.carried.get(key.worker.request, []):
            gated = seated.held is not None and seated.seat.decision is not None
            if gated and seated.seat.decision.key == key:  # type: ignore[union-attr]
                return True  # asked again once its turn opens
            if last and seated.worker == key.worker and seated.exception is not None:
                return True  # it was parked on this when it was ended; as above
        return False

    def _under_way(self, rank: Rank, peer: int) -> bool:
        # A release may be in the channel, or about to be sent by a thread that was interrupted.
        if self.world.channels[peer, rank.stage, rank.column]:
            return True
        forward = self.world.forwards[peer, rank.column]
        if forward.wait is None and not forward.done:
            return True
        return self.world.listeners[peer, rank.stage, rank.column].wait is None

    # --- when nothing can move any more -------------------------------------------------------

    def at_rest(self) -> None:
        """``ends``, ``rest`` and ``sameness``."""
        world = self.world
        for task in world.tasks:
            if task.name.startswith("f") and not task.done:
                name = "dead-ends" if world.dead else "ends"
                raise Liveness(name, f"{task.name} never ends\n{world.report()}")
        if world.dead:
            for where, rank in world.ranks.items():
                if where not in world.dead and rank.core.requests:
                    raise Leak("rest", f"rank {where} keeps {rank.core.requests} for the dead")
            return
        for (stage, column), rank in world.ranks.items():
            self._nothing_left(f"rank {(stage, column)}", rank)
        for channel, messages in world.channels.items():
            if messages:
                raise Leak("rest", f"{len(messages)} messages in channel {channel}")
        for request in world.case.requests:
            self._same(request, expect(world.case, request, world.engine.progress))

    def _nothing_left(self, where: str, rank: Rank) -> None:
        core, link = rank.core, rank.link
        left = {
            "requests": core.requests,
            "pulls": core.pending(),
            "values": core.buffered()[0],
            "landed values": list(link.landed),
            "refusals": list(link.refused),
            "abandonments": list(link.abandoned),
            "results": list(link.results),
            "lazies": list(link.live),
            "workers": list(rank.carried),
            "asked": list(core._asked),
            "pulled": list(core._pulled),
            "asked ahead": list(core._ahead),
        }
        for what, found in left.items():
            if found:
                raise Leak("rest", f"{where} still has {what}: {found}")

    def _same(self, request: Request, expected: Expected) -> None:
        world = self.world
        name = request.name
        faulty = any(f.kind == "raise" and f.request == name for f in world.case.faults)
        outcome = world.engine.outcomes.get(name)
        sequences = [world.engine.progress[found] for found in request.sequences()]
        if faulty or name in self._late:
            if outcome is not None:
                self._faulty(request, expected)
            return
        if any(progress.aborted for progress in sequences):
            if expected.error is None:
                self._same_endings(expected)
            return
        owed = bool(expected.saves or expected.parts or expected.error) or request.traced
        if outcome is None:
            if owed:
                raise Liveness("ends", f"{name} has no outcome")
            self._same_tokens(expected)
            return
        merged = outcome.merged
        if merged is None:
            raise Sameness("sameness", f"{name}: {outcome.problem}")
        if merged.error != expected.error:
            raise Sameness(
                "sameness", f"{name} ends with {merged.error!r}, on one rank {expected.error!r}"
            )
        if expected.error is None:
            self._same_endings(expected)
            self._same_tokens(expected)
        self._same_saves(name, merged, expected)

    def _same_saves(self, name: str, merged: Merged, expected: Expected) -> None:
        """What was saved: all of it or, where the block raised, what was bound before the error."""
        found: dict[str, tuple[str, list[int | None]]] = {
            label: (shape, [None] * shape.count("x"))
            for label, shape in _shapes(merged.skeleton).items()
        }
        for (label, position), value in merged.leaves.items():
            values = found[label][1] if label in found else []
            if position < len(values):  # those that were told of an error later have bound more
                values[position] = value
        if found != expected.saves:
            raise Sameness("sameness", f"{name}: {_difference(found, expected.saves)}")
        if expected.error is not None:
            return
        if merged.parts != expected.parts or any(
            list(mine) != list(theirs)
            for mine, theirs in zip(merged.parts, expected.parts, strict=True)
        ):
            raise Sameness("sameness", f"{name}: {_differing_parts(merged.parts, expected.parts)}")

    def _same_tokens(self, expected: Expected) -> None:
        for name, theirs in expected.tokens.items():
            tokens = self.world.engine.progress[name].tokens
            # What was in flight when a stop string was heard of is sampled, and dropped.
            if self.world.engine.progress[name].cut:
                theirs = theirs[: len(tokens)]
            if tokens != theirs:
                pairs = enumerate(zip(tokens, theirs, strict=False))
                shorter = min(len(tokens), len(theirs))
                turn = next((turn for turn, (a, b) in pairs if a != b), shorter)
                raise Sameness(
                    "sameness", f"{name}: from turn {turn} on other tokens than on one rank"
                )

    def _same_endings(self, expected: Expected) -> None:
        for where, rank in self.world.ranks.items():
            for name, theirs in expected.endings.items():
                endings = rank.endings.get(name, {})
                if endings != theirs:
                    raise Sameness(
                        "sameness",
                        f"{name} on rank {where} ended {endings}, on one rank {theirs}",
                    )

    def _faulty(self, request: Request, expected: Expected) -> None:
        """A request that a fault ended ends with that error, or with the one of a single rank."""
        outcome = self.world.engine.outcomes[request.name]
        error = outcome.merged.error if outcome.merged is not None else outcome.problem
        # Column 0 speaks for the request.
        words = ["fault"] if self._raised("raise", request.name, 1) else []
        words += ["DeadlineExceeded"] if request.name in self._late else []
        known = error is not None and any(word in error for word in words)
        if "fault" in words and error is not None and error.startswith("raise:"):
            known = known or self._other_way(request, error)
        if words and not known and error != expected.error:
            raise Sameness(
                "sameness", f"{request.name} met {' and '.join(words)} and ends with {error!r}"
            )
        if words and error is None:
            raise Sameness("sameness", f"{request.name} met {words} and ends without an error")
        if outcome.merged is not None and outcome.merged.error == "raise:fault":
            self._bound_before(request, outcome.merged)

    def _other_way(self, request: Request, error: str) -> bool:
        """Whether a block may end with this error elsewhere, after a fault on one rank.

        Without what it would still have written there, it may take another way, to an error of its own.
        Where a single block raised on a single rank, one rank can show which.
        """
        case, progress = self.world.case, self.world.engine.progress
        faults = [f for f in case.faults if f.kind == "raise" and f.request == request.name]
        if len(faults) > 1 or case.columns > 1 or request.name in self._late:
            return True
        (fault,) = faults
        expected = expect(case, request, progress, fault_at=fault.at, stage=fault.stage)
        return any(error in endings.values() for endings in expected.endings.values())

    def _bound_before(self, request: Request, merged: Merged) -> None:
        """What comes home of a block that raised by a fault is what it had bound by then on one rank."""
        case, progress = self.world.case, self.world.engine.progress
        faults = [f for f in case.faults if f.kind == "raise" and f.request == request.name]
        steps = {fault.at for fault in faults if fault.column == 0}
        if len(steps) != 1 or len(request.sequences()) > 1 or request.name in self._late:
            return
        block = request.blocks[-1][0]
        expected = expect(case, request, progress, fault_at=steps.pop())
        found = {
            label: shape
            for label, shape in _shapes(merged.skeleton).items()
            if label.startswith(f"0/{block}/")
        }
        bound = {
            label: shape
            for label, (shape, _) in expected.saves.items()
            if label.startswith(f"0/{block}/")
        }
        if found != bound:
            raise Sameness(
                "sameness",
                f"{request.name} had bound {sorted(bound.items())} where it raised, and brings home "
                f"{sorted(found.items())}",
            )


def _differing_parts(
    found: Sequence[Mapping[str, list[int]]], expected: Sequence[Mapping[str, list[int]]]
) -> str:
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if list(mine) != list(theirs):
            return f"cache {number} holds {list(mine)}, on one rank {list(theirs)}"
        for location, values in theirs.items():
            if mine[location] != values:
                return (
                    f"cache {number} at {location!r} holds {list(map(explain, mine[location]))}, "
                    f"on one rank {list(map(explain, values))}"
                )
    return "the same"


def _difference(
    found: Mapping[str, tuple[str, list[int | None]]], expected: Mapping[str, tuple[str, list[int]]]
) -> str:
    for label in sorted({*found, *expected}):
        if found.get(label) != expected.get(label):
            shape, values = found.get(label, ("nothing", []))
            mine = [explain(v) if v is not None else "nothing" for v in values]
            shape_there, values_there = expected.get(label, ("nothing", []))
            theirs = [explain(v) for v in values_there]
            return f"{label} is {shape} {mine}, on one rank {shape_there} {theirs}"
    return "the same"
