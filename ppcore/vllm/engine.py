"""The engine's client side: merging what the stages ship for a finished request."""

from __future__ import annotations

import pickle
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


class PPLLMEngine(NNsightLLMEngine):
    """The synchronous engine over several stages."""

    timeline: TimelineFile | None = None
    deaths: Deaths

    def watch_ranks(self) -> None:
        """Know from now on which rank has died, if one does."""
        self.deaths = Deaths(self.collective_rpc(STATUS), self._fail_calls)

    def _fail_calls(self, error: PeerDied) -> None:
        """End what waits for an answer of the engine's core: none comes any more."""
        for answer in list(self.engine_core.utility_results.values()):
            if not answer.done():
                answer.set_exception(error)

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

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        answers = await super().collective_rpc(method, *args, **kwargs)
        if method == COLLECT:
            return [pickle.dumps(merge_ranks(answers, self.timeline))]
        return answers
