"""Planted bugs: each a one-place wrongness of the code under test, applied while a test runs.

A mutant is a piece of a function's text and what stands there instead. It is planted by compiling the
changed function in its own module and putting it in the original's place, so no shipped line knows of
it; where the text is not found exactly once the mutant says so, and a change of the core cannot
silently make it void.

`ppsim.tested` has those that no simulated run can show, each with the test that fails of it.

Layers: ``core`` and ``seat`` are the decisions, ``saves`` and ``schedule`` their arithmetic, ``host``
the loop that drives them (the simulator's, which follows the runtime's step by step).
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import cases


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: what is wrong, in a few words.
        target: dotted path of the function.
        old: the text to replace; must occur once.
        new: the wrong text.
        seen_in: the mode that shows it, if it is not the one that its layer says.
        test: the test that fails of it, as pytest names it, if no simulated run shows it.
    """

    name: str
    target: str
    old: str
    new: str
    seen_in: str = ""
    test: str = ""

    @property
    def layer(self) -> str:
        """Which part of the project it is in."""
        module = self.target.split(":")[0]
        if module.startswith("ppcore.runtime"):
            return "runtime"
        return module.rpartition(".")[2] if module.startswith("ppcore") else "host"

    @property
    def mode(self) -> str:
        """The mode of `ppsim.fuzz` that runs the code that it is in."""
        return self.seen_in or ("real" if self.layer == "runtime" else "core")


def _core(name: str, method: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"ppcore.core:Core.{method}", old, new)


def _seat(name: str, method: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"ppcore.seat:Seat.{method}", old, new)


def _real(name: str, target: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"ppcore.runtime.{target}", old, new)


def _host(name: str, target: str, old: str, new: str) -> Mutant:
    return Mutant(name, f"ppsim.{target}", old, new)


CATALOGUE: tuple[Mutant, ...] = (
    # --- the life of a value
    _core("cleared-before-drain", "end", "self._request(request).ended = True",
          "self._request(request).ended = True; self._request(request).buffer.clear()"),
    _core("cleared-by-first-done", "_take_done", "self._take_release(peer, key)",
          "state.buffer.pop(key, None)"),
    _core("cleared-by-first-release", "_take_release", "if not entry.peers:", "if True:"),
    _core("never-cleared", "_take_release", "if not entry.peers:", "if False:"),
    _core("release-forgets-the-peer", "_take_release", "entry.peers.discard(peer)", "pass"),
    _core("early-release-ignored", "_take_release",
          "state.released.setdefault(key, set()).add(peer)", "pass"),
    _core("published-for-nobody", "_publish", "- state.released.pop(key, set())", ""),
    _core("published-after-it-was-asked-for", "_publish", "state.waiting.pop(key, ())", "()"),
    _core("kept-for-one-peer-only", "publish", "set(self.peers)", "set(self.peers[:1])"),
    _core("asked-for-by-nobody", "asked_for", "return not state.r", "return False and not state.r"),
    _core("a-released-pull-has-no-answer", "asked_for", "if key in state.waiting:", "if False:"),
    _core("release-to-the-wrong-owner", "release", "by_owner.setdefault(owner, [])",
          "by_owner.setdefault((owner + 1) % self.stages if (owner + 1) % self.stages != self.stage "
          "else owner, [])"),
    _core("released-but-the-first", "release", "Release(tuple(sorted(released)))",
          "Release(tuple(sorted(released))[:1])"),
    _core("done-before-the-last-pull", "_take_done", "if not state.waiting[key]:", "if True:"),
    _core("reply-to-another-peer", "_answer", "(peer, pull.number, pull.key",
          "(self.peers[0], pull.number, pull.key"),
    # --- names
    _core("another-workers-value", "access", "key = made(Key, (worker, state.next_access))",
          "key = Key(Worker(worker.request), state.next_access)"),
    _core("access-number-stands-still", "access", "state.next_access += 1",
          "state.next_access += key.access % 2"),
    _core("pull-by-location-only", "pull", "names.setdefault(key, {})",
          "names.setdefault(key._replace(access=0), {})"),
    _core("pull-without-its-expression", "pull", "name = (location, expression)",
          "name = (location, '')"),
    _core("pulled-again-each-time", "pull", "if number is None:", "if True:"),
    # --- what is asked for ahead
    _core("an-answer-ahead-is-lost", "_answered", "self._ahead[landed.number] = landed", "pass"),
    _core("an-answer-is-always-ahead", "_wanted", "self._ahead.pop(number)", "self._ahead[number]"),
    _core("ahead-and-in-an-earlier-turn", "_wanted", "_replace(available=available)", "_replace()"),
    _core("ahead-of-another-owner", "_read_ahead",
          "self.schedule.owners(following) != (owner,)", "following not in self.schedule"),
    _core("ahead-of-what-is-released", "release",
          "self._not_wanted(state.names.get(key, {}).values())", "pass"),
    _core("ahead-of-another-expression", "_read_ahead", "names[following, expression]",
          "names[following, '']"),
    _core("every-answer-is-a-divergence", "_answer", "if pull.location != location:", "if True:"),
    _core("reply-by-order", "take", "(message.number, token, None)",
          "(min([message.number, *self._asked]), token, None)"),
    _core("numbers-start-again", "_numbered", "self._numbers += 1", "self._numbers = 1"),
    _core("failure-counts-from-the-first-access", "fail",
          "Failed(worker, access, error)", "Failed(worker, 0, error)"),
    _core("failure-in-a-call-counts-as-after-it", "fail", "state.ungiven is None", "True"),
    _core("refuses-what-another-worker-is-asked-for", "finish",
          "if key.worker == worker", "if key.worker.request == worker.request"),
    # --- places
    _core("no-gate", "_decide", "turn >= opened or", "False or"),
    _core("gate-one-turn-late", "_decide", "turn >= opened or",
          "turn >= opened - 1 and turn or"),
    _core("gate-one-turn-early", "_decide", "turn >= opened or", "turn > opened or"),
    _core("behind-the-clock-is-served", "_decide", "if place < state.clock:", "if False:"),
    _core("clock-place-itself-is-behind", "_decide", "if place < state.clock:",
          "if place <= state.clock:"),
    _core("clock-stands-still-on-answers", "_decide", "state.clock = place", "pass"),
    _core("clock-stands-still-on-visits", "served", "state.clock = place", "pass"),
    _core("wrong-owner", "_decide", "if owner == self.stage:",
          "if owner == self.stage or owner == self.stage + 2:"),
    _core("turn-counted-by-other-requests", "turn", "len(found.rounds) - 1",
          "self.round"),
    _core("round-not-counted", "open_round", "self.round += 1",
          "self.round += 1 if self.round < 2 else 0"),
    _core("turn-not-counted", "open_round", "request.rounds.append(self.round)",
          "request.rounds or request.rounds.append(self.round)"),
    _core("answers-a-later-stage-inside-the-handoff", "_decide",
          "state.served_turn == turn", "False"),
    _core("ended-elsewhere-too-soon", "reached", "return seat is not None and", "return True or"),
    _core("ghost-location-runs-everywhere", "_decide",
          "LOCAL if self.stage in home else NEVER", "ANSWER"),
    # --- waits
    _core("waits-for-a-later-stage", "may_block", "(state.rounds[when.turn], when.stage) <",
          "(state.rounds[when.turn], 0) <"),
    _core("waits-in-place-for-an-unopened-turn", "may_block",
          "if when.turn >= len(state.rounds):\n        return False",
          "if when.turn >= len(state.rounds):\n        return True"),
    _core("call-overtakes-the-calls-before-it", "_due", "if state.called is not None:", "if False:"),
    _core("late-value-comes-in-its-own-turn", "available", "Available(other.turn + 1, owner)",
          "Available(other.turn, owner)"),
    _core("never-waits", "may_block", "return (state.rounds[when.turn], when.stage) < self._here",
          "return False"),
    _core("stays-behind-its-last-round", "open_round", "self._here = (self.round, self.stage)",
          "self._here = (self.round, max(self.stage, self._here[1]))"),
    _host("lingers-before-it-hands-on", "rank:Rank.round", "self.world.hand_on(",
          "(yield from self._linger(current)); self.world.hand_on("),
    _core("waits-if-any-allows-it", "may_wait", "return False",
          "return len(numbers) > 1 and any(self.may_wait([number]) for number in numbers)"),
    _core("goes-on-with-what-has-come", "may_wait", "self._pulled.get(number)",
          "self._asked.get(number)"),
    _seat("waits-for-its-own-turns-later-stage", "go_on",
          "return WAIT if self.core.may_wait(self.pulls) else STAY", "return WAIT"),
    _seat("never-woken", "go_on", "WAIT if self.core.may_wait(self.pulls) else STAY", "STAY"),
    _seat("gate-never-opens", "go_on", "return RETRY", "return STAY"),
    _seat("never-is-retried", "_gated", "self.decision.verdict is GATE", "True"),
    _seat("old-decision-after-the-gate", "go_on", "self.decision = again", "pass"),
    # --- calls
    _core("call-with-the-arguments-of-its-home", "call",
          "self.schedule.stage_of(index) if turn != END else min(home)", "min(home)"),
    _core("result-before-it-is-given", "call", "return Calling(key, caller, computes, Available(turn, caller))",
          "return Calling(key, caller, computes, ALWAYS)"),
    _core("receipt-for-everybody", "give", "{home}", "set(self.peers)"),
    _core("call-of-an-unopened-request-dropped", "take",
          "state = self._request(message.key.worker.request)\n            if state.said_done:",
          "state = self._requests.get(message.key.worker.request)\n            "
          "if state is None or state.said_done:"),
    _core("result-under-the-next-name", "computed", "self._publish(key,",
          "self._publish(key._replace(access=key.access + 1),"),
    _core("result-published-for-one-peer", "computed", "set(self.peers)", "set(self.peers[:1])"),
    _host("results-taken-by-order", "seated:Seated._make", "link.results.pop(key)",
          "link.results.pop(next(iter(link.results)))"),
    _host("results-stay-with-their-home", "link:Link._at_once", "del self.results[key]", "pass"),
    _host("call-computed-of-the-whole-result", "link:Link._compute",
          "evaluate(effect.call, effect.of[0])", "effect.of[0]"),
    # --- ends and failures
    _core("done-to-one-peer-only", "say_done", "self._send_all(Done(request))",
          "self._send_all(Done(request))[:1]"),
    _core("dropped-before-peers-are-done", "_drop_if_drained",
          "if not state.said_done or not", "if not state.said_done or False and not"),
    _core("dropped-at-any-done", "_drop_if_drained",
          "if not state.said_done or not state.done.issuperset(set(self.peers) - self.dead):",
          "if not state.said_done or not state.done:"),
    _core("failure-not-told", "fail", "*self._send_all(message), ", ""),
    _core("failure-told-to-one-peer", "fail", "*self._send_all(message)",
          "*self._send_all(message)[1:]"),
    _core("finished-worker-keeps-pulls-waiting", "finish", "effects += self._refuse(peer, pull)",
          "pass"),
    _core("a-done-peers-pull-has-no-answer", "_take_done", "effects += self._refuse(peer, pull)",
          "pass"),
    _core("late-pull-of-a-finished-worker-waits", "_take_pull",
          "if state.said_done or (worker is not None and worker.finished):", "if state.said_done:"),
    _core("death-not-noticed", "peer_died", "if peer in (owner, when.stage):", "if False:"),
    _core("death-of-a-caller-not-noticed", "peer_died", "peer in (owner, when.stage)", "peer == owner"),
    _core("call-that-is-never-given-is-waited-for", "_take_failed",
          "if self._never_given(owner, asked, when):", "if False:"),
    _core("call-that-was-never-given-is-asked-for", "_ask",
          "if self._never_given(owner, message, available):", "if False:"),
    _core("only-who-raised-makes-no-call", "_never_given", "failed is not None and",
          "failed is not None and failed[1] == when.stage and"),
    _core("death-forgets-requests", "peer_died", "effects += self._take_done(peer, name)", "pass"),
    _core("the-dead-are-waited-for", "held", "- self.dead", ""),
    _core("held-to-earlier-stages-too-late", "say_held", "if peer > self.stage",
          "if peer > self.stage + 1"),
    Mutant("last-ships-nothing-of-its-own-accord", "ppcore.saves:to_ship", "(held or last)", "held"),
    Mutant("merge-prefers-the-lazy", "ppcore.saves:to_ship",
           "(position >= len(taken) or taken[position] != _SHIPS)", "position >= len(taken)"),
    Mutant("everybody-ships", "ppcore.saves:to_ship", "(held or last)", "True"),
    Mutant("union-of-what-the-last-holds", "ppcore.saves:union", "if _SHIPS in pair",
           "if pair[1] == _SHIPS"),
    Mutant("error-of-the-last-stage", "ppcore.saves:merge", "raised[0] if raised else shipments[-1]",
           "shipments[-1]"),
    Mutant("occurrences-skip-a-slot", "ppcore.schedule:Schedule.before", "indices[0] < index",
           "indices[0] <= index"),
    Mutant("turn-of-one-slot-only", "ppcore.schedule:Schedule.visit",
           "turn = occurrence //", "slots = slots[:1]; turn = occurrence //"),
    Mutant("shared-visits-of-earlier-stages-forgotten", "ppcore.schedule:Schedule.local_occurrence",
           "if slot.stage < stage", "if False"),
    # --- the loop
    _host("published-after-the-edit", "seated:Seated.handle",
          "yield from link.publish(decision.key, location, value)",
          "self.pending = None; del access; yield from self._go(box); "
          "yield from link.publish(decision.key, location, visit.value); continue"),
    _host("release-overtakes-the-pull", "link:Link.request", "effects += more",
          "effects += [*self.core.release([(base.owner, base.key)]), *more]"),
    _host("messages-overtake-each-other", "world:World._listen", "channel.popleft()", "channel.pop()"),
    _host("answers-stay-when-lazies-die", "link:Link.flush", "self.landed.pop(number, None)", "pass"),
    _host("failures-elsewhere-not-looked-for", "rank:Rank._check_abandoned",
          "yield from self._abandon(worker)", "pass"),
    _host("ended-elsewhere-leaves-its-pulls", "seated:Seated.abandon",
          "yield from self.link.finish(self.worker)", "yield None"),
    _host("pin-stays-after-the-hit", "seated:Seated._answer", "self.hit()", "pass"),
    _host("second-read-forgets-the-edit", "seated:Seated._answer",
          "box = self._seen.get(location)", "box = None"),
    _host("write-not-seen-by-a-later-read", "seated:Seated._answer",
          "self._seen[location] = Box(access.node)", "pass"),
    _host("releases-at-the-end-only", "rank:Rank.round", "yield from self.link.flush()", "pass"),
    _host("settles-without-ending", "rank:Rank.settle", "self.core.end(name)", "pass"),
    _host("settles-nobody", "rank:Rank.settle", "yield from worker.advance()", "pass"),
    _host("done-before-shipping", "rank:Rank.collect", "shipment = yield from self._ship",
          "yield from self.link.say_done(found[0])\n        shipment = yield from self._ship"),
    _host("done-not-said", "rank:Rank._forget", "yield from self.link.say_done(name)", "yield None"),
    _host("registered-blocks-run-last", "rank:Rank._add", "for block, body in request.blocks",
          "for block, body in reversed(request.blocks)"),
    _host("turn-opens-after-the-workers-went-on", "rank:Rank.round",
          "yield from self._go_on(current)", "pass"),
    _host("recomputed-turn-not-opened", "rank:Rank.round", "if workers]",
          "if workers and len(self.world.engine.progress[name].rounds) - 1 "
          "not in self.world.engine.progress[name].recomputed]"),
    _host("result-leaves-the-clock", "seated:Seated.handle", "if known or location in REPLICATED:",
          "if known:"),
    _host("reply-of-the-evaluated-whole", "link:Link._serve",
          "evaluate(effect.expression, token)", "token"),
    # --- skips, parameters, caches, aborts, deadlines
    _host("skipped-layer-runs-all-the-same", "rank:Rank._visit_all",
          "skipped[name] or term(LAYER, layer, value)", "term(LAYER, layer, value)"),
    _host("parameter-lazy-each-time", "seated:Seated._parameter",
          "if location not in self._parameters:", "if True:"),
    _host("aborted-request-stays", "rank:Rank.harvest", "yield from self._forget(name)", "pass"),
    _host("told-before-it-got-there", "rank:Rank.settle", "yield from worker.advance()",
          "yield from self._abandon(worker)\n                if worker.exception is None:\n"
          "                    yield from worker.advance()"),
    _host("deadline-silences-the-stage", "link:Link.exchange_held", "late = error", "raise"),
    _host("own-error-of-any-worker", "rank:Rank.collect", "own = not worker.told", "own = True"),
    _core("deadline-report-without-the-turn", "waits", "if when.turn >= 0", "if False"),
    Mutant("shared-module-recorded-by-one-stage", "ppcore.saves:_turns", "for part in parts for",
           "for part in parts[:1] for"),
    Mutant("recordings-one-stage-after-the-other", "ppcore.saves:_turns",
           "visit[0]", "0"),
    Mutant("recorded-turn-of-a-visit-by-its-number", "ppcore.runtime.collect:_turns",
           "return turns + [turn] * (len(cache.entries[path]) - len(turns))",
           "return list(range(len(cache.entries[path])))", "real"),
    # --- the real runtime
    Mutant("done-again-brings-a-request-back", "ppcore.core:Core.say_done",
           "state = self._requests.get(request)", "state = self._request(request)", "real"),
    _real("published-without-a-copy", "link:Link._keep", "return tensor.clone()",
          "return tensor"),
    _real("second-read-is-the-same-object", "mediator:_again", "return tensor.view(tensor.shape)",
          "return tensor"),
    _real("write-forgotten-by-a-later-read", "mediator:PPMediator._answer",
          "self._seen[slot] = lazy.map_tensors(pending.value, lambda path, tensor: tensor.clone())",
          "pass"),
    _real("result-shared-with-its-home", "calls:Calls.compute", "link.kept(result)", "(result, 1)"),
    _real("real-failure-not-told", "link:Link.failed", "if self.transport is not None:", "if False:"),
    _real("parameters-outlive-their-request", "mediator:PPMediator.let_go",
          "self.parameters = {}", "pass"),
    _real("part-as-it-is-after-an-edit", "expression:_settled",
          "part.cache is not None or bool(family and family.mutations)", "part.cache is not None"),
    _real("pulls-stay-after-the-wait", "mediator:PPMediator._awaited", "self.seat.take()", "pass"),
    _real("real-pin-stays-after-the-hit", "mediator:PPMediator._answer",
          "self.iteration = None", "pass"),
)  # fmt: skip


class Misplaced(Exception):
    """A mutant's text is not where it was: the code changed, and the mutant has to follow."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The code with the bug in it.

    Raises:
        Misplaced: the text to replace does not occur exactly once, or what stands there instead would
            crash every caller.
    """
    module_name, _, path = mutant.target.partition(":")
    module = importlib.import_module(module_name)
    *outer, name = path.split(".")
    owner = module
    for part in outer:
        owner = getattr(owner, part)
    original = owner.__dict__[name]
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(mutant.old) != 1:
        raise Misplaced(
            f"{mutant.name}: {mutant.old!r} occurs {source.count(mutant.old)} times in {mutant.target}"
        )
    # What a plain `super()` looks for is there as it is in the class's own body.
    text = "from __future__ import annotations\ndef _within(__class__):\n"
    text += textwrap.indent(source.replace(mutant.old, mutant.new), " ") + f" return {name}\n"
    made: dict[str, Any] = {}
    exec(compile(text, f"<mutant {mutant.name}>", "exec"), module.__dict__, made)
    wrong = made["_within"](owner)
    if inspect.isgeneratorfunction(original) != inspect.isgeneratorfunction(wrong):
        raise Misplaced(f"{mutant.name}: {mutant.target} is no generator with the bug in it")
    users = [owner]
    if not outer:  # a function that other modules have imported by name
        for user in ("ppsim.rank", "ppsim.engine"):
            importlib.import_module(user)
        others = [found for found in sys.modules.values() if found is not owner]
        users += [user for user in others if getattr(user, "__dict__", {}).get(name) is original]
    places = [(user, name, original, wrong) for user in users]
    _put_in(places)
    _planted.extend(places)
    try:
        yield
    finally:
        del _planted[-len(places) :]
        _take_out(places)


#: Where bugs are planted now: owner, name, what stands there without the bug, and with it.
_planted: list[tuple[Any, str, object, object]] = []


def _put_in(places: list[tuple[Any, str, object, object]]) -> None:
    for owner, name, _, wrong in places:
        setattr(owner, name, wrong)
    _forget()


def _take_out(places: list[tuple[Any, str, object, object]]) -> None:
    for owner, name, right, _ in reversed(places):
        setattr(owner, name, right)
    _forget()


def _forget() -> None:
    """Nothing that was worked out with a bug is kept without it, nor the other way round."""
    cases.schedule.cache_clear()


@contextmanager
def lifted() -> Iterator[bool]:
    """The code without the bugs that are planted, for a while; whether there are any."""
    places = _planted[:]
    _take_out(places)
    try:
        yield bool(places)
    finally:
        _put_in(places)


def named(name: str) -> Mutant:
    """The mutant of this name.

    Raises:
        KeyError: there is none.
    """
    from .tested import TESTED

    return {mutant.name: mutant for mutant in (*CATALOGUE, *TESTED)}[name]
