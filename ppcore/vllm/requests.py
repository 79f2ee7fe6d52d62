"""The requests of one rank of a pipelined engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from nnsight.modeling.vllm.model_runners.GPUModelRunner import Requests

from ..runtime.controllers import Controllers
from ..runtime.link import Link
from ..runtime.mediator import PPMediator
from ..runtime.requests import StagedRequests


class PPRequests(StagedRequests, Requests):
    """nnsight's [`Requests`], whose workers run on every stage.

    Args:
        link: this rank's end of the protocol.
        mediators: what workers become.
        controllers: the model's, which stand in the forward's way only while there are workers.
        leaves: whether this rank will stay behind the forward of the step that begins.
    """

    def __init__(
        self,
        link: Link,
        mediators: type[PPMediator],
        controllers: Controllers,
        leaves: Callable[[], bool],
    ) -> None:
        super().__init__(link, mediators, leaves)
        self._controllers = controllers

    def untraced(self, new: Iterable[Any]) -> bool:
        """Whether a step, with these new requests in it, is vLLM's alone.

        The same on every rank: it goes by what has been asked of all of them, in one order.
        """
        if self.requests or self.templates or any(map(_traced, new)):
            return False
        self._controllers.put(False)
        return True

    def scope(self, model: Any, spans: list[tuple[str, int]]) -> None:
        self._controllers.put(bool(self.workers()))
        super().scope(model, spans)


def _traced(new: Any) -> bool:
    """Whether a new request brings anything of nnsight's."""
    extra = getattr(new.sampling_params, "extra_args", None) or {}
    return any(name.startswith("nnsight") for name in extra)
