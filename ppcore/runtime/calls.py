"""Using a module away from its place in the forward: ad-hoc calls and parameters.

``model.logits_processor(model.lm_head, model.model.norm(h))`` runs where all the modules involved are
real, the call's *home*. The stage whose visit the block is in has the arguments; unless it is the home
itself it sends them there, and the home computes on the thread that received them. Its forward may be
anywhere meanwhile. Everywhere but there the result is a lazy, and can be forced at once.

What the result looks like is asked of the home, once for each shape of arguments: it runs the call on
zeros, alone. That needs no place in the run, so it can be waited for anywhere.

Inside of a module the ranks of a stage may exchange data (tensor parallelism), which they have to do in
one order, on the forward's threads. Such a *collective* call is computed when the home's own worker gets
to it; what an earlier stage does with the result comes too late for the turn that it was made in.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..core import ALWAYS, STATIC
from ..effects import Compute
from ..errors import BlockError
from ..messages import Key, Worker
from . import codec, expression, lazy
from .interleaver import PPInterleaver, Rows, Shape, Template
from .lazy import Base, LazyTensor
from .stubs import ModuleInfo, is_stub
from .threadstate import inferring

if TYPE_CHECKING:
    from .link import Link
    from .mediator import PPMediator


#: The whole of a value.
_WHOLE = expression.of_leaf(())


def module_of(value: Any) -> torch.nn.Module | None:
    """The module behind an envoy or a module, None for anything else."""
    if isinstance(value, torch.nn.Module):
        return value
    module = value.__dict__.get("_module") if hasattr(value, "__dict__") else None
    return module if isinstance(module, torch.nn.Module) else None


def involved(args: tuple, kwargs: dict) -> list[Any]:
    """The envoys and modules among a call's arguments."""
    return [value for value in (*args, *kwargs.values()) if module_of(value) is not None]


class _There(NamedTuple):
    """An argument that is made of a call's result on the home of another call."""

    base: lazy.Base
    expression: str


class _Given:
    """The tensors among a call's arguments, as they are given to its home.

    Attributes:
        tensors: those whose data is sent.
        bases: results of calls that this rank has given to the same home, which others are made of.
    """

    def __init__(self, home: int) -> None:
        self.home = home
        self.tensors: list[torch.Tensor] = []
        self.bases: list[lazy.Base] = []

    def argument(self, path: tuple, tensor: torch.Tensor) -> Any:
        """What stands for an argument: itself, or what it is made of on the home."""
        found = expression.of_base(tensor.node) if isinstance(tensor, lazy.LazyTensor) else None
        if found is None or found[0].owner != self.home or found[0].available != ALWAYS:
            return tensor
        return tensor if found[0].key.access == STATIC else _There(*found)

    def position(self, base: lazy.Base) -> int:
        """Which of the bases it is."""
        if base not in self.bases:
            self.bases.append(base)
        return self.bases.index(base)


class Calls:
    """Ad-hoc calls and parameters on one rank.

    Args:
        interleaver: this rank's; its link must be connected.
        paths: module path -> the module on this rank (a stub where it is elsewhere).
        collective: whether modules may only run on the forward's thread, since the columns of a stage
            exchange data inside of them.
    """

    def __init__(
        self,
        interleaver: PPInterleaver,
        paths: dict[str, torch.nn.Module],
        *,
        collective: bool = False,
    ) -> None:
        self.interleaver = interleaver
        self.paths = paths
        self.collective = collective
        self._path_of = {}
        for path, module in paths.items():
            self._path_of.setdefault(id(module), path)
        self._structures: dict[tuple[int, str], Template] = {}
        # Calls that were computed here -> what they returned or raised, until this rank's worker comes.
        self.results: dict[Key, Any] = {}
        # Held while the interleaver's bystanders change.
        self._beside = threading.Lock()

    # --- the asking side ----------------------------------------------------------------------

    def call(self, mediator: PPMediator, envoy: Any, run: Any, args: tuple, kwargs: dict) -> Any:
        """A worker calls a module: run it here, or answer with a lazy of where it runs."""
        link = self.interleaver.link
        assert link is not None
        core = link.core
        path = self._path(envoy)
        home = core.home(path)
        for value in involved(args, kwargs):
            home &= core.home(self._path(value))
        if not home:
            names = [path, *(self._path(value) for value in involved(args, kwargs))]
            raise BlockError(f"no stage holds all of {names!r}; a call needs its modules together")
        after = [node.base.available for node in _bases(args, kwargs) if node.base is not None]
        with link._changed:
            key, caller, computes, when = core.call(
                mediator.worker_id, path, home, self.collective, after
            )
        if core.stage == computes:
            if core.stage != caller:
                # The receipt for the arguments: the call was computed before it was taken.
                link.fetch([(Base(link, key, path, caller, when), _WHOLE)])
                return self._result(link, key)
            args, kwargs = lazy.resolve((args, kwargs))
            result = run(*args, **kwargs)
            link.publish(key, path, result)
            return result
        template = self._structure(computes, path, args, kwargs)
        if core.stage == caller:
            given = _Given(computes)
            args, kwargs = lazy.map_tensors((args, kwargs), given.argument)
            args, kwargs = lazy.resolve((args, kwargs))
            spelled = self._spell_call(path, args, kwargs, given)
            # As they are now: they are sent from where they lie.
            payload = codec.pieces(link.kept(given.tensors)[0])
            of = tuple(base.key for base in given.bases)
            link._do(lambda: core.give(key, path, computes, spelled, payload, of))
        base = Base(link, key, path, computes, when)
        return template.lazies(base, Rows(0, 0, 0), link.device)  # its extents are all known

    def _result(self, link: Link, key: Key) -> Any:
        """What a call returned that was computed here, or the error that the module raised."""
        with link._changed:
            found = self.results.pop(key)
        if isinstance(found, Exception):
            raise found
        return found

    def parameter(self, mediator: PPMediator, path: str, name: str, info: ModuleInfo) -> LazyTensor:
        """A worker reads a parameter of a module that another stage holds."""
        link = self.interleaver.link
        assert link is not None
        location = f"{path}.{name}"
        kept = mediator.parameters
        if location not in kept:
            # Kept until the request is over: it is one tensor to the block however often it is
            # read, it crosses once, and its pull is answered once.
            owner = min(link.core.home(path))
            key = Key(Worker(mediator.worker_id.request, mediator.worker_id.block), STATIC)
            base = Base(link, key, location, owner, ALWAYS)
            shape, dtype = info.parameters[name]
            kept[location] = lazy.leaf(base, (0,), shape, dtype, link.device)
        return kept[location]

    def _path(self, value: Any) -> str:
        module = module_of(value)
        path = self._path_of.get(id(module))
        if path is None:
            raise BlockError(f"{type(module).__name__} is not a module of the model")
        return path

    def _structure(self, owner: int, path: str, args: tuple, kwargs: dict) -> Template:
        spelled = self._spell_call(path, args, kwargs)
        found = self._structures.get((owner, spelled))
        if found is None:
            link = self.interleaver.link
            assert link is not None
            found = Template(_read(json.loads(link.probe(owner, spelled))))
            self._structures[owner, spelled] = found
        return found

    def _spell_call(self, path: str, args: tuple, kwargs: dict, given: _Given | None = None) -> str:
        """The call as text, with what ``given`` says of its tensors, and without their data."""
        found = {
            "module": path,
            "args": [self._spell(arg, given) for arg in args],
            "kwargs": {name: self._spell(arg, given) for name, arg in kwargs.items()},
        }
        if torch.is_autocast_enabled(self._device.type):
            found["autocast"] = codec.dtype_name(torch.get_autocast_dtype(self._device.type))
        return json.dumps(found, separators=(",", ":"))

    @property
    def _device(self) -> torch.device:
        link = self.interleaver.link
        return link.device if link is not None else torch.device("cpu")

    def _spell(self, value: Any, given: _Given | None) -> Any:
        if isinstance(value, _There):
            assert given is not None
            return {"of": given.position(value.base), "expression": value.expression}
        if module_of(value) is not None:
            return {"module": self._path(value)}
        if isinstance(value, torch.Tensor):
            if given is not None:
                given.tensors.append(value)
            return {"shape": list(value.shape), "dtype": codec.dtype_name(value.dtype)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        if isinstance(value, (tuple, list)):
            return {"items": [self._spell(item, given) for item in value]}
        raise BlockError(f"a {type(value).__name__} cannot be passed to a module of another stage")

    # --- the answering side -------------------------------------------------------------------

    def describe(self, spelled: str) -> str:
        """The structure that a call returns, found by running it on zeros (on a receiving thread)."""
        return json.dumps(_write(self._run(json.loads(spelled), self._zeros)))

    def compute(self, effect: Compute) -> None:
        """Compute a call that a peer gave, and publish the result (on a receiving thread)."""
        link, key = self.interleaver.link, effect.key
        assert link is not None
        kept, size = None, 0
        try:
            with inferring():
                result = self._made(effect)
        except Exception as error:
            result = kept = error
        with link._changed:
            if link.core.awaits(key):
                self.results[key] = result
            wanted = link.core.asked_for(key)
        if wanted and kept is None:
            kept, size = link.kept(result)
        link._do(lambda: link.core.computed(key, effect.location, kept, size))

    def dropped(self, request: str) -> None:
        """Nothing is left of the request, its link's lock being held."""
        for key in [key for key in self.results if key.worker.request == request]:
            del self.results[key]

    def _made(self, effect: Compute) -> Any:
        """What a call returns.

        Raises:
            Exception: what the module raised, or the call whose result is among the arguments.
        """
        rest = iter(effect.token)

        def tensor(part: Any) -> torch.Tensor:
            if "of" not in part:
                return next(rest)
            source = effect.of[part["of"]]
            if isinstance(source, Exception):
                raise source
            found = expression.evaluate(part["expression"], source)
            assert isinstance(found, torch.Tensor)
            return found.to(self._device, copy=True)

        return self._run(json.loads(effect.call), tensor)

    def _run(self, call: dict[str, Any], tensor: Callable[[Any], torch.Tensor]) -> Any:
        """Run a call beside the forward; ``tensor`` gives a tensor for its description."""
        module = self.paths[call["module"]]
        if is_stub(module):
            raise BlockError(f"{call['module']!r} is not real here")
        args = [self._argument(part, tensor) for part in call["args"]]
        kwargs = {name: self._argument(part, tensor) for name, part in call["kwargs"].items()}
        dtype = getattr(torch, call["autocast"]) if "autocast" in call else None
        autocast = torch.autocast(self._device.type, dtype, enabled=dtype is not None)
        thread, interleaver = threading.get_ident(), self.interleaver
        with self._beside:
            interleaver.bystanders |= {thread}
        try:
            with autocast:
                return module(*args, **kwargs)
        finally:
            with self._beside:
                interleaver.bystanders -= {thread}

    def _argument(self, spelled: Any, tensor: Callable[[Any], torch.Tensor]) -> Any:
        if "module" in spelled:
            return self.paths[spelled["module"]]
        if "shape" in spelled or "of" in spelled:
            return tensor(spelled)
        if "items" in spelled:
            return tuple(self._argument(item, tensor) for item in spelled["items"])
        return spelled["value"]

    def _zeros(self, spelled: Any) -> torch.Tensor:
        dtype = getattr(torch, spelled["dtype"])
        return torch.zeros(spelled["shape"], dtype=dtype, device=self._device)

    def value_of(self, location: str) -> torch.Tensor:
        """The parameter that ``location`` names, for a peer."""
        path, _, name = location.rpartition(".")
        module = self.paths[path]
        found = module._parameters.get(name)
        if found is None:
            found = module._buffers[name]
        assert found is not None
        return found.detach()


def _bases(args: tuple, kwargs: dict) -> list[lazy.Node]:
    found: dict[int, lazy.Node] = {}
    stack = [value.node for value in lazy.lazies((args, kwargs))]
    while stack:
        node = stack.pop()
        if node.sequence not in found:
            found[node.sequence] = node
            stack.extend(node.inputs)
    return list(found.values())


def _write(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": codec.dtype_name(value.dtype)}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_write(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _write(item) for key, item in value.items()}}
    return {"value": value}


def _read(spelled: Any) -> Any:
    if "shape" in spelled:
        return Shape(tuple(spelled["shape"]), getattr(torch, spelled["dtype"]))
    if "tuple" in spelled:
        return tuple(_read(item) for item in spelled["tuple"])
    if "list" in spelled:
        return [_read(item) for item in spelled["list"]]
    if "dict" in spelled:
        return {key: _read(item) for key, item in spelled["dict"].items()}
    return spelled["value"]
