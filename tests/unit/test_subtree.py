"""A model's envoys travel in a pickle that is made once, and arrive as nnsight's own would."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from nnsight import NNsight
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.serialization import dumps, loads

from ppcore.runtime import subtree
from ppcore.runtime.envoy import PPEnvoy


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


class Trunk(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.embed = torch.nn.Embedding(3, 2)


class Model(torch.nn.Module):
    """A trunk and a head, whose embedding is the trunk's."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), torch.nn.Linear(2, 3)
        self.tied = self.trunk.embed


class Root(NNsight):
    """A root that ships its tree and has a far side."""

    def far(self, value: Any) -> Any:
        """What ``value`` is on the far side."""
        objects = {f"Module:{envoy.path}": envoy._module for envoy in self.modules()}
        return loads(dumps(value), {"Interleaver": self.interleaver, **objects})


@pytest.fixture
def root() -> Root:
    return Root(Model(), envoys=PPEnvoy, rename={"layers": "blocks"})


def described(envoy: Any) -> dict[str, Any]:
    """All of a tree by value: envoys by their paths, modules and the interleaver by identity."""

    def spelled(value: Any) -> Any:
        if isinstance(value, Envoy):
            return ("envoy", type(value), value.path)
        if isinstance(value, dict):
            return {key: spelled(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [type(value), *map(spelled, value)]
        return value if isinstance(value, str | type | int | None) else id(value)

    found: dict[str, Any] = {}

    def walk(one: Any) -> None:
        state = {name: value for name, value in vars(one).items() if name != "_parent"}
        found[one.path] = (type(one), spelled(one.parent), spelled(state))
        for child in one._children:
            walk(child)

    walk(envoy)
    return found


def of_nnsight(root: Root, value: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``value`` is on the far side by nnsight's own pickling."""
    with monkeypatch.context() as patched:
        patched.delattr(subtree.Shipped, "__reduce_ex__")
        return root.far(value)


def count_made(monkeypatch: pytest.MonkeyPatch) -> list[Envoy]:
    """The tops of the subtrees that are pickled from now on."""
    made: list[Envoy] = []
    real = subtree.Subtree.__init__

    def counted(self: Any, top: Envoy) -> None:
        made.append(top)
        real(self, top)

    monkeypatch.setattr(subtree.Subtree, "__init__", counted)
    return made


class TestArrives:
    def test_as_what_nnsight_makes_of_it(self, root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
        for value in (root, root.trunk, root.head):
            expected = described(of_nnsight(root, value, monkeypatch))
            assert described(root.far(value)) == expected
            assert described(root.far(value)) == expected  # from what was kept

    def test_as_one_tree_however_it_is_reached(self, root: Root) -> None:
        far, (layer, up), trunk = root.far(
            (root, [root.trunk.layers[1], root.trunk.layers[1].up], root.trunk)
        )
        assert far.trunk is trunk
        assert trunk.layers[1] is layer and layer.up is up
        assert far.tied is trunk.embed and far.trunk.blocks is far.trunk.layers
        assert up.parent is layer and layer.parent.parent is trunk and trunk.parent is far

    def test_apart_for_each_request(self, root: Root) -> None:
        one, other = root.far(root), root.far(root)
        one.trunk.layers[0].mark = 1
        one.trunk.layers[0]._aliases["x"] = "up"
        assert not hasattr(other.trunk.layers[0], "mark")
        assert "x" not in other.trunk.layers[0]._aliases
        assert "x" not in root.far(root).trunk.layers[0]._aliases

    def test_a_part_of_the_tree_by_itself(self, root: Root) -> None:
        layer = root.far(root.trunk.layers[1])
        assert (
            layer.path == "model.trunk.layers.1" and layer._module is root.trunk.layers[1]._module
        )


class TestIsMadeOnce:
    def test_for_a_tree_that_stays_as_it_is(
        self, root: Root, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = count_made(monkeypatch)
        for _ in range(3):
            root.far((root, root.trunk.layers[0]))
        assert sorted(top.path for top in made) == ["model.head", "model.trunk"]

    @pytest.mark.parametrize(
        "change",
        [
            lambda root: setattr(root.trunk.layers[0], "name", "other"),
            lambda root: root.trunk.layers[1]._aliases.update(x="up"),
            lambda root: root.trunk.layers[1]._children.reverse(),
            lambda root: root.trunk._child_map.pop("embed"),
            lambda root: delattr(root.trunk, "embed"),
            lambda root: root._update(Model()),
            lambda root: root.trunk._add_envoy("more", torch.nn.Linear(2, 2)),
            lambda root: setattr(root.trunk, "pair", ("a", root.trunk.embed)),
        ],
        ids=["new", "alias", "order", "map", "gone", "modules", "added", "tuple"],
    )
    def test_and_again_when_it_has_changed(
        self, root: Root, change: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root.trunk.layers[0].name = "one"
        root.far(root)
        made = count_made(monkeypatch)
        change(root)
        assert described(root.far(root)) == described(of_nnsight(root, root, monkeypatch))
        assert "model.trunk" in [top.path for top in made]

    def test_with_the_paths_that_its_modules_have_now(self, root: Root) -> None:
        root.far(root)
        elsewhere = Root(root.trunk._module, envoys=PPEnvoy)
        dumps(elsewhere)  # the modules have other paths there
        assert root.far(root).trunk.embed._module is root.trunk.embed._module

    def test_and_trees_that_were_made_for_a_request_do_not_stay(self, root: Root) -> None:
        gone = []
        for _ in range(3):
            far = root.far(root)
            dumps(far)
            gone.append(weakref.ref(far.trunk.layers[0]))
        root.far(root)
        del far
        gc.collect()
        assert [found() for found in gone] == [None] * 3


class TestWhatMayChange:
    """Values that say nothing when they change travel beside the pickle, as they are then."""

    @pytest.mark.parametrize(("before", "after"), [(1, True), (1, 1.0), (0.0, -0.0), (b"a", b"b")])
    def test_an_equal_value_of_another_kind(self, root: Root, before: Any, after: Any) -> None:
        root.trunk.layers[0].mark = before
        root.far(root)
        root.trunk.layers[0].mark = after
        assert repr(root.far(root).trunk.layers[0].mark) == repr(after)

    def test_a_tensor_and_a_list_changed_in_place(self, root: Root) -> None:
        layer = root.trunk.layers[0]
        layer.mark, layer.seen = torch.zeros(2), [[1]]
        root.far(root)
        layer.mark.add_(1)
        layer.seen[0].append(2)
        far = root.far(root).trunk.layers[0]
        assert far.mark.tolist() == [1, 1] and far.seen == [[1, 2]]

    def test_a_value_put_where_one_was_that_compares_as_a_tensor(self, root: Root) -> None:
        root.trunk.layers[0].mark = "name"
        root.far(root)
        root.trunk.layers[0].mark = torch.ones(2)
        assert root.far(root).trunk.layers[0].mark.tolist() == [1, 1]

    @pytest.mark.parametrize("shared", [torch.zeros(2), ["a"], {"a": "b"}], ids=str)
    def test_is_the_object_that_the_block_names_too(self, root: Root, shared: Any) -> None:
        root.trunk.layers[0].mark = shared
        for _ in range(2):
            far, same = root.far((root, shared))
            assert far.trunk.layers[0].mark is same

    def test_envoys_of_other_subtrees_in_a_circle(self, root: Root) -> None:
        root.trunk.layers[0].friend, root.head.friend = root.head, root.trunk.layers[0]
        for _ in range(2):
            far = root.far(root)
            assert far.trunk.layers[0].friend is far.head
            assert far.head.friend is far.trunk.layers[0]

    def test_a_copy_with_edits_of_its_own(self, root: Root) -> None:
        copied = root.trunk.layers[0]._shallow_copy()
        copied._edits.append("an edit")
        far, own = root.far((root, copied))
        assert own._edits == ["an edit"] and far.trunk.layers[0]._edits == []

    def test_edits(self, root: Root) -> None:
        root.far(root)
        root.trunk.layers[0]._edits.append(3)
        assert root.far(root).trunk.layers[0]._edits == [3]
        root.trunk.layers[0]._edits.append(4)
        assert root.far(root).trunk.layers[0]._edits == [3, 4]


class Stateful(PPEnvoy):
    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "more": "told"}


@pytest.mark.parametrize("kind", [Envoy, Stateful])
def test_envoys_of_other_classes_travel_as_they_say(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Root(Model(), envoys={torch.nn.Linear: kind, torch.nn.Module: PPEnvoy})
    made = count_made(monkeypatch)
    for _ in range(2):
        far, up = root.far((root, root.trunk.layers[0].up))
        assert far.trunk.layers[0].up is up
        assert described(far) == described(of_nnsight(root, root, monkeypatch))
    assert not made
    assert getattr(up, "more", None) == ("told" if kind is Stateful else None)


def test_a_model_can_be_copied(root: Root) -> None:
    twin = copy.copy(root.trunk)
    assert twin is not root.trunk and twin._module is root.trunk._module
    assert described(twin).keys() == described(root.trunk).keys()
