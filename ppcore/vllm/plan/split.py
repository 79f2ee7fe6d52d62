"""vLLM's rule for the layers of each stage, without vLLM.

Layers are dealt out evenly. Those that remain go one each to stages counted from the last but one
towards the first: the last stage has the norm and the head to hold, so it never gets one, and the
first, which has the embedding, is the last to get one. `VLLM_PP_LAYER_PARTITION` ("5,6,5") replaces
the rule. The counterpart in vLLM is `get_pp_indices` of `vllm.distributed.utils`.
"""

from __future__ import annotations

from ...errors import SetupError

#: The environment variable that replaces the rule.
PARTITION = "VLLM_PP_LAYER_PARTITION"


def layer_counts(layers: int, stages: int, partition: str | None = None) -> list[int]:
    """The number of layers of each stage.

    Args:
        partition: comma-separated counts, as `VLLM_PP_LAYER_PARTITION` has them.

    Raises:
        SetupError: fewer layers than stages, or a partition that does not fit.
    """
    if stages < 1:
        raise SetupError(f"pipeline_parallel_size={stages}: use at least 1")
    if layers < stages:
        raise SetupError(
            f"pipeline_parallel_size={stages} is more than the model's {layers} layers; use at most "
            f"{layers}"
        )
    if partition is not None:
        return _parsed(partition, layers, stages)
    counts = [layers // stages] * stages
    for n in range(layers % stages):
        counts[-2 - n] += 1
    return counts


def _parsed(partition: str, layers: int, stages: int) -> list[int]:
    try:
        counts = [int(count) for count in partition.split(",")]
    except ValueError:
        raise SetupError(
            f"{PARTITION}={partition!r} is not a list of whole numbers such as '5,6,5'"
        ) from None
    said = f"{PARTITION}={partition!r}"
    if len(counts) != stages:
        raise SetupError(f"{said} names {len(counts)} stages, and there are {stages}")
    if sum(counts) != layers:
        raise SetupError(f"{said} adds up to {sum(counts)} layers, and the model has {layers}")
    if min(counts) < 1:
        raise SetupError(f"{said} leaves a stage without a layer; give each at least 1")
    return counts
