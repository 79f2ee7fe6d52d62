"""nnsight's hold on a model's modules, let go of while nobody traces.

nnsight puts a controller in the place of every module's ``forward``. With no worker in a step it only
asks whether there is one, and calls on: a few microseconds a module, a few hundred modules a step. An
engine that serves no trace at the moment takes them out, and runs what vLLM runs.
"""

from __future__ import annotations

import torch
from nnsight.intervention.source import STATE, Controller

_SLOT = "forward"


class Controllers:
    """The controllers of a module tree, all of them in place or none.

    Only those go that stand before a class's own ``forward``: a module that had one of its own in the
    same slot when it was wrapped (Accelerate's hooks, a compiled module) keeps its controller.

    Args:
        root: the model, wrapped by nnsight; its controllers are in place.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.in_place = True
        self._held = [
            (module.__dict__, controller)
            for module in root.modules()
            if isinstance(controller := module.__dict__.get(_SLOT), Controller)
            and "_hf_hook" not in module.__dict__
            and module.__dict__[STATE].original is type(module).forward
        ]

    def put(self, wanted: bool) -> None:
        """Have the controllers in place, or out; cheap where nothing changes."""
        if wanted == self.in_place:
            return
        self.in_place = wanted
        for attributes, controller in self._held:
            if wanted:
                attributes[_SLOT] = controller
            elif attributes.get(_SLOT) is controller:
                del attributes[_SLOT]
