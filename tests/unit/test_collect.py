from __future__ import annotations

import dataclasses
import json
import threading
from collections import OrderedDict, namedtuple
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nnsight.intervention.cache import Cache, CacheView, Entry

from ppcore.errors import Diverged
from ppcore.runtime.collect import Taken, opened, put_together
from ppcore.runtime.lazy import force, is_lazy
from ppcore.runtime.requests import StagedRequests
from ppcore.saves import Shipment, merge, spell_leaves, union
from tests.unit.fake import Owner

X = torch.arange(12.0).reshape(4, 3)

Pair = namedtuple("Pair", "early late")


@dataclasses.dataclass
class Record:
    name: str
    value: Any = None
    inner: list = dataclasses.field(default_factory=list)


#: Locations that belong to one stage only, though others record their module too.
OWNER = {"m.outer.input": 0, "m.outer.output": 1}


def place(location: str, stage: int) -> tuple[int, bool] | None:
    """As a schedule would tell it: ``m.7.output`` is the eighth location."""
    if OWNER.get(location, stage) != stage:
        return None
    name = location.split(".")[1]
    if name == "unknown":
        return 2 * stage, False
    return (int(name) if name.isdigit() else 0), True


def ship(saves: list[dict[str, Any]]) -> list[Shipment]:
    """What each stage sends home, in stage order, having heard the earlier ones."""
    said: list[dict[str, str]] = []
    shipments = []
    for stage, mine in enumerate(saves):
        taken = Taken(mine)
        ships = taken.ships(union(said), last=stage == len(saves) - 1)
        said.append(json.loads(json.dumps(spell_leaves(ships))))
        shipments.append(taken.shipment(ships, partial(place, stage=stage)))
    return shipments


def home(*saves: dict[str, Any]) -> dict[str, Any]:
    return put_together(merge(ship(list(saves))))


def halves(make: Any) -> tuple[Any, Any]:
    """The same structure on two stages: the first leaf is real on stage 0, the second on stage 1."""
    return make(X, Owner().read(X * 2)), make(Owner().read(X), X * 2)


STRUCTURES = {
    "list": lambda a, b: [a, b, 1, "x", None],
    "tuple": lambda a, b: (a, (b,), ()),
    "dict": lambda a, b: {"a": a, 3: {"b": b}},
    "ordered dict": lambda a, b: OrderedDict(b=b, a=a),
    "named tuple": lambda a, b: Pair(a, b),
    "dataclass": lambda a, b: Record("r", a, [b, Record("inner", b)]),
    "nested": lambda a, b: [{"k": [Pair(a, [b])]}, {1, 2}],
}


def leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return leaves([getattr(value, field.name) for field in dataclasses.fields(value)])
    if isinstance(value, dict):
        return leaves(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in leaves(part)]
    return []


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_a_structure_comes_home_with_each_leaf_from_where_it_is(make: Any) -> None:
    zero, one = halves(make)
    found = home({"kept": zero}, {"kept": one})["kept"]
    expected = make(X, X * 2)
    assert type(found) is type(expected)
    assert [t.tolist() for t in leaves(found)] == [t.tolist() for t in leaves(expected)]
    assert all(type(leaf) is torch.Tensor for leaf in leaves(found))


def test_each_leaf_is_shipped_once_and_nothing_is_forced_for_it() -> None:
    zero, one = halves(lambda a, b: [a, b])
    shipments = ship([{"kept": zero}, {"kept": one}])
    assert [sorted(found.leaves) for found in shipments] == [[("kept", 0)], [("kept", 1)]]
    assert is_lazy(zero[1]) and is_lazy(one[0])


def test_a_leaf_that_nobody_holds_is_forced_by_the_last_stage_only() -> None:
    owners = [Owner(), Owner()]
    lazies = [owner.read(X)[-1] for owner in owners]
    found = home({"row": lazies[0]}, {"row": lazies[1]})
    assert found["row"].tolist() == X[-1].tolist()
    assert [owner.fetches for owner in owners] == [0, 1]
    assert owners[1].pulled_bytes == 12


def test_leaves_that_nobody_holds_are_one_exchange() -> None:
    owner = Owner()
    a, b = owner.read((X, X + 1))
    assert home({"kept": [a, b.clone()]})["kept"][1].tolist() == (X + 1).tolist()
    assert owner.fetches == 1


def test_an_edited_lazy_comes_home_edited() -> None:
    lazy = Owner().read(X)
    lazy[0] = 9.0
    assert home({"h": lazy})["h"][0].tolist() == [9, 9, 9]


def test_one_tensor_saved_twice_is_one_object_at_home() -> None:
    for tensor in (X, X[1:, 0], Owner().read(X), Owner().read(X)[1:, 0]):
        found = home({"kept": [tensor, tensor, {"again": tensor}]})["kept"]
        assert found[0] is found[1] is found[2]["again"]


def test_one_container_under_two_names_is_one_object_at_home() -> None:
    shared = [X]
    found = home({"a": shared, "b": {"inner": shared}})
    assert found["a"] is found["b"]["inner"]


def test_a_container_that_holds_itself_comes_home() -> None:
    loop: list = [X]
    loop.append(loop)
    found = home({"loop": loop})["loop"]
    assert found[1] is found


def test_a_small_view_does_not_bring_the_memory_around_it() -> None:
    (shipment,) = ship([{"row": torch.zeros(1000, 1000)[3]}])
    assert shipment.leaves["row", 0].untyped_storage().nbytes() == 4000


def test_a_forced_lazys_leaf_is_a_plain_tensor() -> None:
    lazy = Owner().read(X)
    force(lazy)
    (shipment,) = ship([{"h": lazy}])
    assert type(shipment.leaves["h", 0]) is torch.Tensor


def test_a_parameter_and_a_scalar_come_home() -> None:
    found = home({"p": torch.nn.Parameter(X), "n": 3, "s": torch.tensor(2.5), "none": None})
    assert torch.equal(found["p"], X)
    assert (found["n"], found["s"].item(), found["none"]) == (3, 2.5, None)


def test_names_keep_their_order_and_an_empty_request_comes_home_empty() -> None:
    assert list(home({"z": 1, "a": 2})) == ["z", "a"]
    assert home({}) == {}


def test_stages_that_saved_different_structures_diverged() -> None:
    with pytest.raises(Diverged, match=r"\['kept'\]"):
        home({"kept": [X]}, {"kept": [X, X]})


# --- caches -----------------------------------------------------------------------------------


def cache(*turns: dict[str, list[Any]], **entries: list[Any]) -> CacheView:
    """What a cache has recorded in each of ``turns``, or of ``entries`` one visit in each turn."""
    made = Cache(None, modules=[])
    for turn in range(max((len(found) for found in entries.values()), default=0)):
        turns += ({path: found[turn : turn + 1] for path, found in entries.items()},)
    for turn, visits in enumerate(turns):
        if turn:
            opened(made, turn)
        for path, found in visits.items():
            made.entries.setdefault(path, []).extend(Entry(output=value) for value in found)
    return CacheView(made, None)


def of(view: CacheView) -> dict[str, list[Any]]:
    return {path: [entry.output for entry in found] for path, found in view._cache.entries.items()}


def test_caches_of_all_stages_are_merged_in_the_models_order() -> None:
    zero = cache(**{"m.1": ["b"], "m.0": ["a", "aa"]})
    one = cache(**{"m.3": ["d"], "m.2": ["c"]})
    found = of(home({"cache": zero}, {"cache": one})["cache"])
    assert list(found.items()) == [
        ("m.0", ["a", "aa"]),
        ("m.1", ["b"]),
        ("m.2", ["c"]),
        ("m.3", ["d"]),
    ]


def test_a_module_that_no_schedule_knows_stays_where_it_was_recorded() -> None:
    zero = cache(**{"m.0": ["a"], "m.unknown.a": ["x"], "m.1": ["b"]})
    one = cache(
        **{
            "m.unknown.b": ["y"],
            "m.2": ["c"],
            "m.3": ["d"],
            "m.0": ["a"],  # shared by the stages
            "m.unknown.c": ["z"],
            "m.4": ["e"],
        }
    )
    found = of(home({"cache": zero}, {"cache": one})["cache"])
    assert "".join(values[0] for values in found.values()) == "axbycdze"


def test_a_visit_that_one_stage_skipped_moves_no_other_into_its_turn() -> None:
    zero, one = cache(**{"m.rotary": ["a0", "a1"]}), cache({}, {"m.rotary": ["b1"]})
    assert of(home({"c": zero}, {"c": one})["c"]) == {"m.rotary": ["a0", "a1", "b1"]}
    assert of(home({"c": one}, {"c": zero})["c"]) == {"m.rotary": ["a0", "b1", "a1"]}


def test_a_module_that_both_stages_visit_has_the_visits_of_each_turn_together() -> None:
    zero, one = cache(**{"m.rotary": ["a0", "a1"]}), cache(**{"m.rotary": ["b0", "b1"]})
    assert of(home({"c": zero}, {"c": one})["c"]) == {"m.rotary": ["a0", "b0", "a1", "b1"]}


def test_a_module_that_spans_stages_has_the_firsts_input_and_the_lasts_output() -> None:
    saves = []
    for stage in ("0", "1"):
        view = cache(**{"m.outer": []})
        view._cache.include_inputs = True
        seen = Entry(inputs=((f"in{stage}",), {}), output=f"out{stage}")
        view._cache.entries = {"m.outer": [seen]}
        saves.append({"c": view})
    ((path, entries),) = home(*saves)["c"]._cache.entries.items()
    assert path == "m.outer"
    assert [(entry.input, entry.output) for entry in entries] == [("in0", "out1")]


def test_two_caches_keep_apart_and_one_saved_twice_is_one() -> None:
    def saved(stage: str) -> dict[str, Any]:
        first, second = cache(**{f"m.{stage}": [stage]}), cache(**{f"n.{stage}": [stage]})
        return {"first": first, "second": second, "again": [first, first._cache]}

    found = home(saved("0"), saved("1"))
    assert of(found["first"]) == {"m.0": ["0"], "m.1": ["1"]}
    assert of(found["second"]) == {"n.0": ["0"], "n.1": ["1"]}
    assert found["again"][0] is found["first"]
    assert found["again"][1] is found["first"]._cache


def test_a_save_that_cannot_be_pickled_is_its_requests_error() -> None:
    link = SimpleNamespace(core=SimpleNamespace(stage=0, stages=1, requests=[]))
    rank = SimpleNamespace(link=link, _recorded=partial(place, stage=0))
    saves = {"fine": X, "x": threading.Lock()}
    shipment = StagedRequests._ship(rank, "r", saves, None)  # type: ignore[arg-type]
    assert "cannot pickle" in json.dumps(shipment.error) and shipment.own_error
    assert not shipment.leaves
