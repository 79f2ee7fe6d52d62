from __future__ import annotations

import inspect

import pytest
import torch

from ppcore.runtime import stubs
from ppcore.runtime.stubs import ModuleInfo


class Missing(torch.nn.Module):
    """The engine's own placeholder for a layer of another stage."""


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.name = "attn"
        self._hidden = 1
        self.scale = None
        self.table = {"not": "plain"}
        self.qkv = torch.nn.Linear(2, 6, bias=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x)


class Model(torch.nn.Module):
    """A stage of a model of four layers, of which it has some."""

    def __init__(self, first: int, last: int, *, norm: bool = False) -> None:
        super().__init__()
        layers = [Attention() if first <= i < last else Missing() for i in range(4)]
        self.layers = torch.nn.ModuleList(layers)
        if norm:
            self.norm = torch.nn.LayerNorm(2)


def known(*stages: Model) -> dict[str, ModuleInfo]:
    found: dict[str, ModuleInfo] = {}
    for stage in stages:
        for path, module in stubs.real_modules(stage, "model", (Missing,)).items():
            found.setdefault(path, ModuleInfo.of(module))
    return found


def test_what_other_stages_know_of_a_module_is_plain() -> None:
    info = ModuleInfo.of(Attention())
    assert info.class_path == f"{__name__}:Attention"
    assert {"heads": 4, "name": "attn", "scale": None}.items() <= info.attributes.items()
    assert "_hidden" not in info.attributes and "table" not in info.attributes
    assert info.parameters == {"mask": ((3,), torch.bool)}
    assert ModuleInfo.of(torch.nn.Linear(2, 6)).parameters == {
        "weight": ((6, 2), torch.float32),
        "bias": ((6,), torch.float32),
    }


def test_real_modules_leave_out_placeholders_and_stubs() -> None:
    stage = Model(0, 2)
    whole = known(stage, Model(2, 4))
    before = set(stubs.real_modules(stage, "model", (Missing,)))
    stubs.fill(stage, "model", whole, {}, (Missing,))
    assert "model.layers.2" not in before
    assert set(stubs.real_modules(stage, "model", (Missing,))) == before


def test_every_path_of_the_whole_model_resolves_after_filling() -> None:
    stage = Model(0, 2)
    made = stubs.fill(stage, "model", known(stage, Model(2, 4, norm=True)), {}, (Missing,))
    assert made == [
        "model.layers.2",
        "model.layers.2.qkv",
        "model.layers.3",
        "model.layers.3.qkv",
        "model.norm",
    ]
    assert stubs.is_stub(stage.layers[3].qkv)
    assert stubs.is_stub(stage.norm)
    assert not stubs.is_stub(stage.layers[0])


def test_who_walks_through_the_modules_finds_those_of_this_stage() -> None:
    """vLLM looks for the layers that it has wrapped for adapters in this way."""
    stage = Model(0, 2)
    before = [name for name, module in stage.named_modules() if not isinstance(module, Missing)]
    stubs.fill(stage, "model", known(stage, Model(2, 4, norm=True)), {}, (Missing,))
    assert [name for name, _ in stage.named_modules()] == before
    assert stubs.is_stub(stage.get_submodule("layers.3.qkv"))


def test_a_stub_looks_like_the_real_module() -> None:
    stub = stubs.make("model.layers.2", ModuleInfo.of(Attention()))
    assert isinstance(stub, Attention)
    assert (type(stub).__name__, stub.heads, stub.name) == ("Attention", 4, "attn")
    assert "self.qkv(x)" in inspect.getsource(type(stub).forward)


def test_a_stub_has_no_parameters_of_its_own() -> None:
    stub = stubs.make("model.norm", ModuleInfo.of(torch.nn.LayerNorm(2)))
    assert list(stub.parameters()) == []
    with pytest.raises(AttributeError):
        stub.weight
    with pytest.raises(AttributeError):
        stub.no_such_thing


def test_a_stub_called_outside_a_block_says_where_it_belongs() -> None:
    stub = stubs.make("model.norm", ModuleInfo.of(torch.nn.LayerNorm(2)))
    with pytest.raises(RuntimeError, match="'model.norm' belongs to another pipeline stage"):
        stub(torch.ones(2))


def test_stubs_of_one_class_share_a_class() -> None:
    info = ModuleInfo.of(torch.nn.Linear(2, 2))
    assert type(stubs.make("a", info)) is type(stubs.make("b", info))


@pytest.mark.parametrize(
    "path", ["no.such.module:Thing", "torch:nothing", "json:dumps", "math:pi", ":"]
)
def test_a_class_that_cannot_be_found_here_becomes_a_plain_module(path: str) -> None:
    stub = stubs.make("model.x", ModuleInfo(path, {"k": 1}))
    assert isinstance(stub, torch.nn.Module)
    assert stub.k == 1


def test_a_module_at_two_paths_is_one_stub_at_both() -> None:
    whole = Model(0, 4)
    whole.layers[3] = whole.layers[2]
    stage = Model(0, 2)
    aliases = {"model.layers.3": "model.layers.2", "model.layers.3.qkv": "model.layers.2.qkv"}
    stubs.fill(stage, "model", known(whole), aliases, (Missing,))
    assert stage.layers[3] is stage.layers[2]


def test_a_module_shared_across_stages_leads_to_this_ranks_own() -> None:
    stage, other = Model(2, 4), Model(0, 2)
    rope = torch.nn.Identity()
    for layer in (stage.layers[2], stage.layers[3]):
        layer.rope = rope
    other.layers[0].rope = other.layers[1].rope = torch.nn.Identity()
    aliases = {f"model.layers.{i}.rope": "model.layers.0.rope" for i in range(1, 4)}
    stubs.fill(stage, "model", known(other, stage), aliases, (Missing,))
    assert stage.layers[0].rope is rope


def test_filling_twice_changes_nothing() -> None:
    stage = Model(0, 2)
    whole = known(stage, Model(2, 4))
    stubs.fill(stage, "model", whole, {}, (Missing,))
    first = dict(stubs.modules(stage, "model"))
    stubs.fill(stage, "model", whole, {}, (Missing,))
    assert set(dict(stubs.modules(stage, "model"))) == set(first)


def test_modules_are_listed_at_each_of_their_paths() -> None:
    model = Model(0, 1)
    model.again = model.layers[0]
    paths = [path for path, module in stubs.modules(model, "m") if module is model.layers[0]]
    assert paths == ["m.layers.0", "m.again"]


def test_a_forward_that_walks_through_all_layers_gets_what_the_engine_had_there() -> None:
    class PassesOn(torch.nn.Identity):
        pass

    stage = Model(2, 4)
    stage.layers[0] = PassesOn()
    stubs.fill(stage, "model", known(Model(0, 2), Model(2, 4)), {}, (Missing, PassesOn))
    assert stubs.is_stub(stage.layers[0]) and isinstance(stage.layers[0], Attention)
    x = torch.ones(1, 2)
    assert stage.layers[0](x) is x
    with pytest.raises(RuntimeError, match=r"'model.layers.0.qkv' belongs to another"):
        stage.layers[0].qkv(x)
