"""Stand-ins for the modules that another stage holds.

The client's tree has every module of the model; a rank has those of its stage. Wherever a path does
not resolve here, a stub is put in its place: an instance of the real module's class (so that its
``forward`` can be read and ``isinstance`` answers alike) with the real one's plain attributes, and
without parameters. Calling one, or reading its parameters, inside a block goes to the owner.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import getcurrent


@dataclass(frozen=True)
class ModuleInfo:
    """What other stages know of a module.

    Attributes:
        class_path: ``package.module:Class``.
        attributes: its attributes that are plain values.
        parameters: parameter or buffer name -> (shape, dtype).
    """

    class_path: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: torch.nn.Module) -> ModuleInfo:
        """Describe a real module."""
        kind = type(module)
        attributes = {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_") and isinstance(value, (bool, int, float, str, type(None)))
        }
        tensors = {**module._parameters, **module._buffers}
        parameters = {
            name: (tuple(tensor.shape), tensor.dtype)
            for name, tensor in tensors.items()
            if tensor is not None
        }
        return cls(f"{kind.__module__}:{kind.__qualname__}", attributes, parameters)


class Stub:
    """Mixed into the class of a module that is not here."""

    _ppcore_path: str
    _ppcore_info: ModuleInfo
    #: What the engine had here. A forward that walks through the layers of all stages calls it.
    _ppcore_placeholder: torch.nn.Module | None

    def __getattr__(self, name: str) -> Any:
        info = self.__dict__.get("_ppcore_info")
        if info is not None and name in info.parameters:
            mediator = getattr(getcurrent(), "mediator", None)
            if mediator is not None:
                return mediator().interleaver.parameter(self._ppcore_path, name, info)
        return super().__getattr__(name)  # type: ignore[misc]

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """None: an engine that walks its tree, for the layers that take adapters, finds those of its stage."""
        return iter(())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._ppcore_placeholder is not None:
            return self._ppcore_placeholder(*args, **kwargs)
        raise RuntimeError(
            f"module {self._ppcore_path!r} belongs to another pipeline stage and was called outside "
            "a traced block"
        )


_classes: dict[type, type] = {}


def _class(path: str) -> type:
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, ImportError, ValueError):
        found = torch.nn.Module
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        found = torch.nn.Module
    made = _classes.get(found)
    if made is None:
        made = _classes[found] = type(
            found.__name__, (Stub, found), {"__module__": found.__module__}
        )
    return made


def make(
    path: str, info: ModuleInfo, placeholder: torch.nn.Module | None = None
) -> torch.nn.Module:
    """A stub for the module at ``path``, without children, in place of the engine's placeholder."""
    kind = _class(info.class_path)
    stub: Any = kind.__new__(kind)  # type: ignore[call-overload]
    torch.nn.Module.__init__(stub)
    for name, value in info.attributes.items():
        stub.__dict__[name] = value
    stub.__dict__["_ppcore_path"] = path
    stub.__dict__["_ppcore_info"] = info
    stub.__dict__["_ppcore_placeholder"] = placeholder
    return stub


def is_stub(module: Any) -> bool:
    """Whether ``module`` stands in for one of another stage."""
    return isinstance(module, Stub)


def modules(root: torch.nn.Module, prefix: str) -> Iterable[tuple[str, torch.nn.Module]]:
    """Every path of the tree below ``root`` with its module, shared ones at each path."""
    yield prefix, root
    for name, child in root._modules.items():
        if child is not None:
            yield from modules(child, f"{prefix}.{name}")


def aliases(root: torch.nn.Module, prefix: str) -> dict[str, str]:
    """Path -> first path of the same module object, for modules that the tree reaches twice."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for path, module in modules(root, prefix):
        known = first.setdefault(id(module), path)
        if known != path:
            found[path] = found[known] = known
    return found


def real_modules(
    root: torch.nn.Module, prefix: str, missing: tuple[type, ...]
) -> dict[str, torch.nn.Module]:
    """Path -> module for what is real here; ``missing`` are the engine's own placeholders."""
    return {
        path: module
        for path, module in modules(root, prefix)
        if not isinstance(module, missing) and not is_stub(module)
    }


def fill(
    root: torch.nn.Module,
    prefix: str,
    known: Mapping[str, ModuleInfo],
    aliases: Mapping[str, str],
    missing: tuple[type, ...],
) -> list[str]:
    """Put a stub at every path of ``known`` that is not real here; the paths, in order.

    Args:
        known: path -> description, for every module that is real on some stage.
        aliases: path -> the path under which the whole model has the same module object first. A
            module shared by layers of several stages (a rotary embedding) is real on each; its
            first path then leads to this rank's own object.
    """
    here = real_modules(root, prefix, missing)
    shared: dict[str, torch.nn.Module] = {}
    for path, first in aliases.items():
        if path in here:
            shared.setdefault(first, here[path])
    made: list[str] = []
    for path in known:
        if path in here or path == prefix:
            continue
        parent_path, _, name = path.rpartition(".")
        parent = _resolve(root, prefix, parent_path)
        if parent is None:
            continue
        module = shared.get(aliases.get(path, path))
        if module is None:
            there = parent._modules.get(name)
            module = make(path, known[path], there if isinstance(there, missing) else None)
            shared[aliases.get(path, path)] = module
            made.append(path)
        parent._modules[name] = module
    return made


def _resolve(root: torch.nn.Module, prefix: str, path: str) -> torch.nn.Module | None:
    if path == prefix:
        return root
    module: Any = root
    for part in path.removeprefix(prefix + ".").split("."):
        module = module._modules.get(part) if module is not None else None
    return module
