"""The engine's client side: merging what the stages ship for a finished request."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncIterator
from typing import Any

from nnsight.modeling.vllm.engines.engine import NNsightLLMEngine, attach
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

from ..errors import PeerDied
from ..runtime.collect import entry
from ..saves import Shipment
from .deaths import Deaths
from .timeline import Part, TimelineFile

#: The RPC that nnsight collects through.
COLLECT = "collect_nnsight"
#: The RPC behind `VLLM.pp_status`.
STATUS = "ppcore_status"


def merge_ranks(payloads: list, timeline: TimelineFile | None = None) -> dict[str, dict]:
    """Request id -> the entry that nnsight attaches to its output, from every rank's payload.

    ``payloads`` are in rank order; a rank that reports nothing sent None. What the ranks recorded goes
    to ``timeline``.
    """
    shipped: dict[str, list[Shipment]] = {}
    parts: list[Part] = []
    for payload in payloads:
        if payload is not None:
            shipments, part = pickle.loads(payload)
            for request, shipment in shipments.items():
                shipped.setdefault(request, []).append(shipment)
            parts += [part] if part is not None else []
    if timeline is not None:
        timeline.append(parts)
    return {request: entry(shipments) for request, shipments in shipped.items()}


def fail_calls(core: Any, error: PeerDied) -> None:
    """End what waits for an answer of the engine's core: none comes any more."""
    for answer in list(core.utility_results.values()):
        if not answer.done():
            answer.set_exception(error)


class PPLLMEngine(NNsightLLMEngine):
    """The synchronous engine over several stages."""

    timeline: TimelineFile | None = None
    deaths: Deaths

    def watch_ranks(self) -> None:
        """Know from now on which rank has died, if one does."""
        self.deaths = Deaths(self.collective_rpc(STATUS), self._fail_calls)

    def _fail_calls(self, error: PeerDied) -> bool:
        dead = bool(self.engine_core.resources.engine_dead)
        fail_calls(self.engine_core, error)
        return dead

    def step(self) -> Any:
        try:
            return self._step()
        except EngineDeadError as dead:
            raise self.deaths.error() from dead

    def _step(self) -> Any:
        outputs = LLMEngine.step(self)
        by_id = {output.request_id: output for output in outputs if output.finished}
        if not by_id:
            return outputs
        finished = list(by_id)
        collected = merge_ranks(
            self.engine_core.collective_rpc(
                COLLECT, args=(finished, finished, pickle.dumps(by_id))
            ),
            self.timeline,
        )
        for output in outputs:
            entry = collected.get(output.request_id)
            if entry is not None:
                attach(output, entry)
        return outputs


class PPAsyncLLM(AsyncLLM):
    """The asynchronous engine over several stages.

    nnsight merges the ranks' payloads itself; it is handed one that is merged already.
    """

    timeline: TimelineFile | None = None
    #: Set by the first use: before it there is no loop to ask the ranks on.
    _watched: asyncio.Task[Deaths] | None = None

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        async with self._naming_the_dead():
            answers = await super().collective_rpc(method, *args, **kwargs)
        if method == COLLECT:
            return [pickle.dumps(merge_ranks(answers, self.timeline))]
        return answers

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """vLLM's stream of outputs.

        Raises:
            PeerDied: a rank's process has died.
        """
        async with (
            self._naming_the_dead(),
            contextlib.aclosing(super().generate(*args, **kwargs)) as outputs,
        ):
            async for output in outputs:
                yield output

    @contextlib.asynccontextmanager
    async def _naming_the_dead(self) -> AsyncIterator[None]:
        if self._watched is None:
            self._watched = asyncio.ensure_future(self._watch_ranks())
        try:
            await asyncio.shield(self._watched)
            yield
        except EngineDeadError as dead:
            deaths = self._watched.result()
            raise await asyncio.to_thread(deaths.error) from dead

    async def _watch_ranks(self) -> Deaths:
        """Know from now on which rank has died, if one does."""
        loop, core = asyncio.get_running_loop(), self.engine_core

        def fail(error: PeerDied) -> bool:
            dead = bool(core.resources.engine_dead)
            with contextlib.suppress(
                RuntimeError
            ):  # a loop that is closed has nobody waiting on it
                loop.call_soon_threadsafe(fail_calls, core, error)
            return dead

        return Deaths(await super().collective_rpc(STATUS), fail)
