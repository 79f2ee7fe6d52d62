"""Envoys that know that a module may be on another stage."""

from __future__ import annotations

from typing import Any

from greenlet import getcurrent
from nnsight.intervention.envoy import Envoy

from .subtree import Shipped


class StagedCall:
    """Mixed into an envoy class: an ad-hoc call inside a block runs where the modules are real."""

    def __call__(self, *args: Any, hook: bool = False, **kwargs: Any) -> Any:
        calls = getattr(self.interleaver, "calls", None)  # type: ignore[attr-defined]
        mediator = getattr(getcurrent(), "mediator", None)
        run = super().__call__  # type: ignore[misc]
        if calls is None or mediator is None or hook:
            return run(*args, hook=hook, **kwargs)
        return calls.call(mediator(), self, run, args, kwargs)


class PPEnvoy(Shipped, StagedCall, Envoy):
    """An [`Envoy`] of a model that may be split into stages."""
