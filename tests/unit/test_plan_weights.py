"""The weights that `ppcore plan` computes against those that Transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppcore.vllm.plan import read
from ppcore.vllm.plan.weights import FAMILIES, weights
from tests.unit.test_plan import LLAMA

ARCHITECTURES = {
    "BloomForCausalLM": {"n_layer": 5, "n_head": 4},
    "DeepseekV2ForCausalLM": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
    },
    "FalconForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 5, "n_head": 4, "n_positions": 128},
    "GPTNeoXForCausalLM": {},
    "Gemma2ForCausalLM": {"head_dim": 32},
    "Gemma3ForCausalLM": {"head_dim": 32},
    "GemmaForCausalLM": {"head_dim": 32},
    "GraniteForCausalLM": {},
    "GraniteMoeForCausalLM": {"num_local_experts": 4},
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": {"head_dim": 32},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "OPTForCausalLM": {"ffn_dim": 128, "word_embed_proj_dim": 32, "max_position_embeddings": 128},
    "Phi3ForCausalLM": {"pad_token_id": 0},
    "Qwen2ForCausalLM": {},
    "Qwen2MoeForCausalLM": {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 96,
        "decoder_sparse_step": 2,
    },
    "Qwen3ForCausalLM": {"head_dim": 32},
    "Qwen3MoeForCausalLM": {
        "head_dim": 32,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "mlp_only_layers": [1],
    },
    "SmolLM3ForCausalLM": {"pad_token_id": 0},
    "Starcoder2ForCausalLM": {},
}


def checkpoint_config(architecture: str, tied: bool | None = None) -> Any:
    """A small configuration of Transformers' class for an architecture."""
    import transformers

    model_class = getattr(transformers, architecture)
    sizes = dict(LLAMA, **ARCHITECTURES[architecture], architectures=[architecture])
    del sizes["tie_word_embeddings"]
    if tied is not None:
        sizes["tie_word_embeddings"] = tied
    known = set(model_class.config_class().to_dict()) | {"architectures", "tie_word_embeddings"}
    attributes = model_class.config_class.attribute_map
    sizes = {attributes.get(key, key): value for key, value in sizes.items()}
    return model_class.config_class(
        **{key: value for key, value in sizes.items() if key in known | {"dtype"}}
    )


def test_every_architecture_counted_here_is_compared() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("tied", [None, True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_has_the_parameters_that_transformers_builds(
    architecture: str, tied: bool | None, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = checkpoint_config(architecture, tied)
    with torch.device("meta"):
        model = getattr(transformers, architecture)(made)
    made.save_pretrained(tmp_path)
    found = weights(read(str(tmp_path)))
    assert found is not None
    assert found.tied == made.tie_word_embeddings
    assert found.total() == sum(parameter.numel() for parameter in model.parameters())
