"""What a request carries of the model: its envoys, pickled once and not once a request.

A block that names ``model`` ships it, and with it an envoy for every module: 273 of them for a Llama of 24
layers, 19 ms of the client's time for each request, when hardly ever anything about them has changed since
the last one. So a subtree, which is a child of the model and all below it, is pickled the first time that it
is shipped, and those bytes are sent again as long as every envoy in it is what it was. What the other side
makes of them is what nnsight's own pickling makes: new envoys for each request, over the modules that it has.

A value of which this module cannot tell whether it has changed, such as an attribute that a user put on
an envoy, is not among those bytes: it travels beside them, as it is then.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

from nnsight.intervention.envoy import Envoy
from nnsight.intervention.serialization import DEFAULT_PROTOCOL, CustomCloudPickler

#: What travels as a reference: the far side has its own.
_REFERENCES = ("_module", "interleaver")
#: An envoy's own lists and dicts. Any other is a user's, and may be known to the block by another name.
_CONTAINERS = ("_aliases", "_child_map", "_children", "_edits", "_envoys", "_rename")


class Subtree:
    """The envoys from a child of the model down, and their pickle.

    Args:
        top: the child.
    """

    def __init__(self, top: Envoy) -> None:
        self._envoys = list(_below(top))
        places = {id(envoy): place for place, envoy in enumerate(self._envoys)}
        parents = [places.get(id(envoy.parent)) for envoy in self._envoys]
        #: What envoys refer to and the far side has: their modules and the interleaver.
        self.references: list[Any] = []
        #: (envoy's place, attribute, value) of what travels beside.
        self.beside: list[tuple[int, str, Any]] = []
        states: list[dict[str, Any]] = []
        #: Every envoy's attributes as they were, copied where they could be changed in place.
        self._were: list[dict[str, Any]] = []
        for place, envoy in enumerate(self._envoys):
            state = envoy.__getstate__()  # tags the references
            were = dict(envoy.__dict__)
            for name in list(state):
                if name in _REFERENCES:
                    if id(state[name]) not in places:
                        places[id(state[name])] = len(places)
                        self.references.append(state[name])
                elif _settled(state[name], places, inside=name in _CONTAINERS):
                    were[name] = _copied(state[name])
                else:
                    self.beside.append((place, name, state.pop(name)))
            states.append(state)
            self._were.append(were)
        self._tags = self._tagged()
        file = io.BytesIO()
        pickler = _Pickler(file, places)
        pickler.dump(([type(envoy) for envoy in self._envoys], parents))
        pickler.dump(states)
        #: Two pickles, one after the other: classes and parents, then attributes.
        self.payload = file.getvalue()

    def holds(self) -> bool:
        """Whether the envoys are still what was pickled."""
        try:
            return (
                all(
                    envoy.__dict__ == were
                    for envoy, were in zip(self._envoys, self._were, strict=True)
                )
                and all(
                    self._envoys[place].__dict__[name] is value
                    for place, name, value in self.beside
                )
                and self._tagged() == self._tags
            )
        except Exception:
            return False  # a value that cannot be compared is not the one that could

    def _tagged(self) -> list[Any]:
        return [reference.__dict__.get("_persistent_id") for reference in self.references]


class Shipped:
    """Mixed into an envoy class: it travels in the pickle of its subtree."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced(self) or super().__reduce_ex__(protocol)  # type: ignore[arg-type]

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, list):
            _put_beside(self, state)  # type: ignore[arg-type]
        else:
            super().__setstate__(state)  # type: ignore[misc]


def _reduced(envoy: Envoy) -> tuple | None:
    """How an envoy travels; None for one that is not a part of a tree, below its root."""
    steps: list[int] = []
    while (parent := envoy.parent) is not None:
        step = next((i for i, child in enumerate(parent._children) if child is envoy), None)
        if step is None:
            return None  # a copy, which has edits of its own
        if parent.parent is None:
            break
        steps.insert(0, step)
        envoy = parent
    if parent is None:
        return None
    # By path: trees that a rank made for a request have its interleaver too, and must not stay.
    kept = vars(envoy.interleaver).setdefault("_subtrees", {})
    top, subtree = kept.get(envoy.path, (None, None))
    # Whoever is reached from the top leaves it to that to see whether it has changed.
    if top is not envoy or not (steps or subtree is None or subtree.holds()):
        subtree = Subtree(envoy) if all(map(_known, _below(envoy))) else None
        kept[envoy.path] = envoy, subtree
    if subtree is None:
        return None  # envoys of other classes say themselves how they travel
    if steps:
        return _descend, (envoy, steps)
    return _restore, (subtree.payload, subtree.references), subtree.beside or None


def _known(envoy: Envoy) -> bool:
    kind: Any = type(envoy)
    return (
        issubclass(kind, Shipped)
        and kind.__getstate__ is Envoy.__getstate__
        and kind.__setstate__ is Shipped.__setstate__
        and kind.__reduce_ex__ is Shipped.__reduce_ex__
    )


def _below(top: Envoy) -> Iterator[Envoy]:
    yield top
    for child in top._children:
        yield from _below(child)


def _settled(value: Any, places: dict[int, int], *, inside: bool) -> bool:
    """Whether comparing finds every change of it: it is a name, a class or an envoy of the tree.

    Args:
        inside: whether it may be made of such.
    """
    if inside and type(value) is dict:
        parts = [each for item in value.items() for each in item]
        return all(_settled(each, places, inside=True) for each in parts)
    if inside and type(value) in (list, tuple):
        return all(_settled(each, places, inside=True) for each in value)
    if isinstance(value, Envoy):
        return id(value) in places
    return value is None or type(value) is str or isinstance(value, type)


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return value


class _Pickler(CustomCloudPickler):
    """Writes envoys and what they refer to as their places."""

    def __init__(self, file: io.BytesIO, places: dict[int, int]) -> None:
        super().__init__(file, protocol=DEFAULT_PROTOCOL)
        self._places = places

    def persistent_id(self, obj: Any) -> int | None:
        return self._places.get(id(obj))


# --- on the far side ----------------------------------------------------------------------------------


def _restore(payload: bytes, references: list[Any]) -> Envoy:
    """New envoys over ``references``; the top one, whose parent is yet to be told."""
    found: list[Any] = []
    unpickler: Any = pickle.Unpickler(io.BytesIO(payload))
    unpickler.persistent_load = found.__getitem__
    kinds, parents = unpickler.load()
    envoys = [kind.__new__(kind) for kind in kinds]
    found += envoys
    found += references
    for envoy, parent, state in zip(envoys, parents, unpickler.load(), strict=True):
        state["_parent"] = None if parent is None else weakref.ref(envoys[parent])
        envoy.__dict__.update(state)
    return envoys[0]


def _put_beside(top: Envoy, beside: list[tuple[int, str, Any]]) -> None:
    """Give the envoys of a restored subtree what travelled beside it."""
    envoys = list(_below(top))
    for place, name, value in beside:
        envoys[place].__dict__[name] = value


def _descend(envoy: Envoy, steps: list[int]) -> Envoy:
    for step in steps:
        envoy = envoy._children[step]
    return envoy
