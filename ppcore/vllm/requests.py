"""The requests of one rank of a pipelined engine."""

from __future__ import annotations

from collections.abc import Callable
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

    def scope(self, model: Any, spans: list[tuple[str, int]]) -> None:
        self._controllers.put(bool(self.workers()))
        super().scope(model, spans)
