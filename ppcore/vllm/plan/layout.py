"""A plan: what each rank of a layout holds, and whether vLLM would start it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .architectures import DROPPED, SPLIT, TRANSFORMERS, WHOLE
from .config import Config
from .split import PARTITION, layer_counts
from .weights import PARTS, Weight, Weights, padded_vocab, weights

#: Bytes of one parameter.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Stage:
    """One pipeline stage; its columns all hold the same amount."""

    stage: int
    first_layer: int
    #: One past the last.
    end_layer: int
    #: What it works with, of "embedding", "layers", "norm" and "head".
    holds: tuple[str, ...]
    #: What vLLM builds here beside it, though another stage works with it.
    unused: tuple[str, ...] = ()
    #: Part -> parameters on each rank; None where the architecture's weights are not known here,
    #: or its columns do not fit.
    parameters: dict[str, int] | None = None
    dtype: str = "bfloat16"

    @property
    def layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def total(self) -> int:
        """Parameters on each rank; 0 where they are not known."""
        return sum((self.parameters or {}).values())

    @property
    def bytes(self) -> int:
        return self.total * DTYPES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """A model laid out over stages x columns."""

    model: str
    architecture: str
    stages: tuple[Stage, ...]
    columns: int
    dtype: str
    #: Parameters of the checkpoint, each once; None where they are not known.
    parameters: int | None
    tied: bool | None
    partition: str | None
    #: Names of weights that columns divide, that they copy, and that each has whole.
    divided: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    #: Why vLLM would refuse to start.
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def layers(self) -> int:
        return self.stages[-1].end_layer

    @property
    def largest(self) -> Stage | None:
        """The stage with most bytes on each rank; the first of equals."""
        known = [stage for stage in self.stages if stage.parameters]
        return max(known, key=lambda stage: stage.total, default=None)


def make(
    config: Config,
    *,
    model: str,
    stages: int = 1,
    columns: int = 1,
    dtype: str | None = None,
    partition: str | None = None,
) -> Plan:
    """Lay a model out.

    Args:
        model: the name to show.
        dtype: a key of `DTYPES`; by default what vLLM makes of the configuration's.
        partition: the value of `VLLM_PP_LAYER_PARTITION`.

    Raises:
        SetupError: the sizes allow no such layout at all.
    """
    counts = layer_counts(config.size("layers"), stages, partition)
    found = weights(config)
    chosen, dtype_note = (dtype, None) if dtype else default_dtype(config)
    fits = found is not None and all(weight.fits(columns) for weight in _all(found))
    divided, copied, whole = _split(found, columns) if found and fits else ((), (), ())
    plan = Plan(
        model=model,
        architecture=config.architecture,
        stages=tuple(_stages(counts, found if fits else None, columns, chosen)),
        columns=columns,
        dtype=chosen,
        parameters=found.total() if found else None,
        tied=found.tied if found else None,
        partition=partition,
        divided=divided,
        copied=copied,
        whole=whole,
    )
    plan.problems.extend(_problems(config, found, stages, columns))
    plan.notes.extend(filter(None, [dtype_note, *_notes(config, found, plan)]))
    return plan


def default_dtype(config: Config) -> tuple[str, str | None]:
    """What vLLM's `dtype="auto"` makes of the configuration's, and a remark where they differ."""
    said = config.get("dtype", config.get("torch_dtype"))
    said = said if said is not None else config.whole.get("dtype", config.whole.get("torch_dtype"))
    if said in ("bfloat16", "float16"):
        return said, None
    if said == "float32":
        return "bfloat16", (
            "the checkpoint is float32, which vLLM runs as bfloat16 unless it is told "
            "dtype='float32'; here: --dtype float32"
        )
    return "bfloat16", f"the configuration's dtype is {said!r}; bytes are counted for bfloat16"


def _stages(counts: list[int], found: Weights | None, columns: int, dtype: str) -> Iterator[Stage]:
    start, last = 0, len(counts) - 1
    for n, count in enumerate(counts):
        holds = ["layers"]
        if n == 0:
            holds.insert(0, "embedding")
        if n == last:
            holds += ["norm", "head"]
        parameters: dict[str, int] | None = None
        unused: list[str] = []
        if found:
            built = _built(found, n, last)
            unused = [part for part in built if part not in holds]
            if found.tied and n == last and "embedding" in unused:
                unused.remove("embedding")  # it is the head
            parameters = {part: _share(found.part(part), columns) for part in built}
            parameters["layers"] = sum(
                _share(layer, columns) for layer in found.layers[start : start + count]
            )
        yield Stage(n, start, start + count, tuple(holds), tuple(unused), parameters, dtype)
        start += count


def _built(found: Weights, stage: int, last: int) -> list[str]:
    """Parts other than the layers whose parameters a stage has."""
    built = []
    if stage == 0 or "embedding" in found.everywhere or (found.tied and stage == last):
        built.append("embedding")
    if stage == last or "norm" in found.everywhere:
        built.append("norm")
    if not found.tied and (stage == last or "head" in found.everywhere):
        built.append("head")
    return built


def _share(part: tuple[Weight, ...], columns: int) -> int:
    return sum(weight.per_column(columns) for weight in part)


def _all(found: Weights) -> Iterator[Weight]:
    for name in PARTS:
        if name == "layers":
            for layer in found.layers:
                yield from layer
        elif not (name == "head" and found.tied):
            yield from found.part(name)


def _split(found: Weights, columns: int) -> tuple[tuple[str, ...], ...]:
    divided: dict[str, None] = {}
    copied: dict[str, None] = {}
    whole: dict[str, None] = {}
    for weight in _all(found):
        if not weight.axis:
            whole[weight.name] = None
        elif weight.axis == "key-value heads" and weight.units < columns:
            copied[weight.name] = None
        else:
            divided[weight.name] = None
    return tuple(divided), tuple(copied), tuple(whole)


def _problems(config: Config, found: Weights | None, stages: int, columns: int) -> Iterator[str]:
    name = config.architecture
    if name in DROPPED:
        yield f"vLLM dropped {name}; its version {DROPPED[name]} was the last to run it"
    elif name in WHOLE and stages > 1:
        yield (
            f"vLLM cannot split {name} into stages: its class there does not implement SupportsPP; "
            "use tensor_parallel_size instead"
        )
    if columns == 1:
        return
    heads = config.size("heads", columns)
    if heads % columns:
        yield f"tensor_parallel_size={columns} does not divide the {heads} attention heads"
    if not found:
        return
    told = {"heads"}
    for weight in _all(found):
        if weight.axis in told or weight.fits(columns):
            continue
        told.add(weight.axis)
        units, what = weight.units, weight.axis
        if what == "vocabulary":
            units, what = padded_vocab(units), "(padded) rows of the vocabulary"
        elif what == "width":
            what = f"units of the {weight.name}'s width"
        yield f"tensor_parallel_size={columns} does not fit the {units} {what}"


def _notes(config: Config, found: Weights | None, plan: Plan) -> Iterator[str | None]:
    name, stages = plan.architecture, len(plan.stages)
    if name not in SPLIT | WHOLE and name not in DROPPED:
        yield (
            f"vLLM 0.32 has no class for {name}: it tries Transformers' own, which stages can split "
            "where it has one list of layers"
        )
    elif name in TRANSFORMERS:
        yield f"vLLM runs {name} through Transformers' own code"
    if found is None:
        yield (
            f"the weights of {name} are not known here: only the split of its layers is shown, and "
            "nothing about tensor parallelism beyond its attention heads"
        )
    if config.part:
        yield f"only the language model ({config.part}) is shown; the other parts are not counted"
    if config.get("quantization_config", config.whole.get("quantization_config")):
        yield "the checkpoint is quantized: its bytes are fewer than those counted here"
    if plan.partition is not None:
        yield f"the layers follow {PARTITION}={plan.partition!r}"
    elif len({stage.layers for stage in plan.stages}) > 1:
        yield (
            f"{plan.layers} layers do not divide by {stages} stages; {PARTITION}="
            f"{','.join(str(stage.layers) for stage in plan.stages)!r} is what vLLM does, and another "
            "list changes it"
        )
    if found and found.tied and stages > 1:
        yield ("the head is tied to the embedding: the last stage has its own copy of the table")
    for part in sorted({part for stage in plan.stages for part in stage.unused}):
        where = [str(stage.stage) for stage in plan.stages if part in stage.unused]
        yield f"vLLM builds the {part} on stage {', '.join(where)} too, where nothing uses it"
    if plan.copied:
        yield f"fewer key-value heads than columns: columns share copies of {', '.join(plan.copied)}"
