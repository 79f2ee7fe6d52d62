"""What must hold, by name.

=================  ============================================================================
``sameness``       saves, tokens, error and how each block ended are those of a single rank
``ends``           every request ends; a hang prints who waits for whom
``wait-rule``      a forward waits only for a place strictly smaller than its own (round, stage)
``rest``           when everything has ended, nothing is left of it on any rank
``bounded``        a value stays published only while a peer may still ask for it
``once``           a value crosses to a rank at most once for each expression
``columns-agree``  the columns of a stage gather the same values
``dead-ends``      a rank that dies ends every wait (``ends``, in a run with a death)
=================  ============================================================================

Each is checked at the first event at which it can be seen. Places come from the engine's own record
of rounds, so that a core that misjudges a wait is found out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppcore.messages import Message, Pull

from .failures import Leak, Liveness, Sameness
from .oracle import Expected, expect
from .terms import explain

if TYPE_CHECKING:
    from .link import Link
    from .rank import Rank
    from .world import World


class Properties:
    """The checks of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._pulled: set[tuple[int, int, int, object, str, str]] = set()
        self.most_buffered = 0

    # --- while it runs ------------------------------------------------------------------------

    def sent(self, stage: int, column: int, peer: int, message: Message) -> None:
        """``once``: nobody asks for the same thing twice."""
        if type(message) is Pull:
            name = (stage, column, peer, message.key, message.location, message.expression)
            if name in self._pulled:
                raise Leak("once", f"stage {stage} pulls {message.key} twice")
            self._pulled.add(name)

    def blocks(self, link: Link, numbers: list[int]) -> None:
        """``wait-rule``: the forward of a rank blocks for these pulls."""
        rank = self.world.rank(link.stage, link.column)
        for number in numbers:
            if number not in link.core._asked:
                continue  # answered; the listener is about to say so
            request, when = link.origins[number]
            if when.turn < 0 or link.core.ended(request):
                continue
            rounds = self.world.engine.progress[request].rounds
            mine = (rank.core.round, link.stage)
            if when.turn >= len(rounds) or (rounds[when.turn], when.stage) >= mine:
                raise Liveness(
                    "wait-rule",
                    f"stage {link.stage} in round {rank.core.round} waits for turn {when.turn} "
                    f"of {request!r} on stage {when.stage}",
                )

    def ships(self, rank: Rank, label: str) -> None:
        """``once``: only the last stage brings what it ships; the others ship what they hold."""
        if not rank.last:
            raise Leak("once", f"stage {rank.stage} pulls {label!r} to ship it")

    def closed(self, rank: Rank) -> None:
        """``bounded``: a round is over; nothing is published here that nobody can ask for."""
        if rank.link.lost:
            raise Leak("bounded", f"stage {rank.stage} keeps releases to itself: {rank.link.lost}")
        for name, state in rank.core._requests.items():
            for key, entry in state.buffer.items():
                if not any(self._may_ask(rank, peer, name, key) for peer in entry.peers):
                    raise Leak(
                        "bounded", f"stage {rank.stage} keeps {entry.location!r} ({key}) for nobody"
                    )
            self.most_buffered = max(self.most_buffered, len(state.buffer))

    def _may_ask(self, rank: Rank, peer: int, name: str, key: object) -> bool:
        other = self.world.rank(peer, rank.column)
        state = other.core._requests.get(name)
        if (peer, rank.column) in self.world.dead or name not in other.known:
            return True
        if state is None or state.said_done:
            return self._under_way(rank, peer)
        worker = state.workers.get(key.worker.block)  # type: ignore[attr-defined]
        if worker is None or worker.next_access <= key.access:  # type: ignore[attr-defined]
            # A block that ended early on that rank alone ends the request; its values may stay so long.
            return True
        if key in other.link.live:
            return True
        for seated in other.carried.get(name, []):
            gated = seated.held is not None and seated.seat.decision is not None
            if gated and seated.seat.decision.key == key:  # type: ignore[union-attr]
                return True  # asked again once its turn opens
        if any(lost == key for _, lost, _ in other.link.lost):
            return True
        return self._under_way(rank, peer)

    def _under_way(self, rank: Rank, peer: int) -> bool:
        # A release may be in the channel, or about to be sent by a thread that was interrupted.
        if self.world.channels[peer, rank.stage, rank.column]:
            return True
        tasks = self.world.tasks
        return any(
            task.name == f"f{peer}.{rank.column}" and task.wait is None and not task.done
            for task in tasks
        ) or any(
            task.name == f"l{rank.stage}.{rank.column}<{peer}" and task.wait is None
            for task in tasks
        )

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
            expected = expect(world.case, request, world.engine.progress[request.name].recomputed)
            self._same(request.name, expected)

    def _nothing_left(self, where: str, rank: Rank) -> None:
        core, link = rank.core, rank.link
        left = {
            "requests": core.requests,
            "pulls": core.pending(),
            "values": core.buffered()[0],
            "landed values": list(link.landed),
            "refusals": list(link.refused),
            "abandonments": list(link.abandoned),
            "lazies": list(link.live),
            "workers": list(rank.carried),
            "asked": list(core._asked),
        }
        for what, found in left.items():
            if found:
                raise Leak("rest", f"{where} still has {what}: {found}")

    def _same(self, name: str, expected: Expected) -> None:
        world = self.world
        faulty = any(f.kind == "raise" and f.request == name for f in world.case.faults)
        tokens = world.engine.progress[name].tokens
        outcome = world.engine.outcomes.get(name)
        if not world.requests[name].blocks:
            if tokens != expected.tokens:
                raise Sameness("sameness", f"{name}: other tokens than on one rank")
            return
        if outcome is None:
            raise Liveness("ends", f"{name} has no outcome")
        if faulty:
            return self._faulty(name, expected)
        merged = outcome.merged
        if merged is None:
            raise Sameness("sameness", f"{name}: {outcome.problem}")
        if merged.error != expected.error:
            raise Sameness(
                "sameness", f"{name} ends with {merged.error!r}, on one rank {expected.error!r}"
            )
        if expected.error is not None:
            return
        self._same_endings(name, expected)
        if tokens != expected.tokens:
            turn = next(
                (
                    i
                    for i, (a, b) in enumerate(zip(tokens, expected.tokens, strict=False))
                    if a != b
                ),
                min(len(tokens), len(expected.tokens)),
            )
            raise Sameness("sameness", f"{name}: from turn {turn} on other tokens than on one rank")
        found: dict[str, list[int | None]] = {}
        for (label, position), value in sorted(merged.leaves.items()):
            leaves = found.setdefault(label, [])
            leaves += [None] * (position - len(leaves))
            leaves.append(value)
        if found != expected.saves:
            raise Sameness("sameness", f"{name}: {_difference(found, expected.saves)}")

    def _same_endings(self, name: str, expected: Expected) -> None:
        for (stage, column), rank in self.world.ranks.items():
            endings = rank.endings.get(name, {})
            if endings != expected.endings:
                raise Sameness(
                    "sameness",
                    f"{name} on rank {(stage, column)} ended {endings}, on one rank "
                    f"{expected.endings}",
                )

    def _faulty(self, name: str, expected: Expected) -> None:
        outcome = self.world.engine.outcomes[name]
        raised = any(
            "fault" in how
            for rank in self.world.ranks.values()
            for how in rank.endings.get(name, {}).values()
        )
        error = outcome.merged.error if outcome.merged is not None else outcome.problem
        known = error is not None and ("fault" in error or error == expected.error)
        if raised and not known:
            raise Sameness("sameness", f"{name} raised on one rank and ends with {error!r}")


def _difference(found: dict[str, list[int | None]], expected: dict[str, list[int]]) -> str:
    for label in sorted({*found, *expected}):
        if found.get(label) != expected.get(label):
            mine = [explain(v) if v is not None else "nothing" for v in found.get(label, [])]
            theirs = [explain(v) for v in expected.get(label, [])]
            return f"{label} is {mine}, on one rank {theirs}"
    return "the same"
