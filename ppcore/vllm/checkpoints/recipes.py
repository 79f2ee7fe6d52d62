"""How each architecture spells a recipe's sizes in its Hugging Face config.

What a recipe does not say is set here once for every architecture: the smallest sizes that the CPU
kernels run, and no dropout, so that a checkpoint differs from its architecture's real ones in size
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .tokenizer import EOS_ID

Recipe = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        model_type: transformers' name for it.
        sizes: a recipe in the words of its config.
        tied: whether its output head usually is the embedding.
        own_kv_heads: whether it has fewer key-value heads than heads.
    """

    model_type: str
    sizes: Callable[[Recipe], dict[str, Any]]
    tied: bool = False
    own_kv_heads: bool = True

    def config(self, recipe: Recipe) -> Any:
        """The config of a checkpoint of this recipe."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.model_type,
            vocab_size=recipe["vocab"],
            tie_word_embeddings=recipe["tied"],
            bos_token_id=EOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=EOS_ID,
            **self.sizes(recipe),
        )


def _common(recipe: Recipe) -> dict[str, Any]:
    return {
        "hidden_size": recipe["hidden"],
        "intermediate_size": 2 * recipe["hidden"],
        "num_hidden_layers": recipe["layers"],
        "num_attention_heads": recipe["heads"],
        "num_key_value_heads": recipe["kv_heads"],
        "max_position_embeddings": recipe["positions"],
    }


def _with_head_size(recipe: Recipe) -> dict[str, Any]:
    # Of these the head size is a setting, and its default that of a large model.
    return {**_common(recipe), "head_dim": recipe["hidden"] // recipe["heads"]}


def _gemma(recipe: Recipe) -> dict[str, Any]:
    sizes = _with_head_size(recipe)
    # Local and global layers in turn, the window shorter than a prompt.
    kinds = ["sliding_attention", "full_attention"] * recipe["layers"]
    return {
        **sizes,
        "query_pre_attn_scalar": sizes["head_dim"],
        "sliding_window": 16,
        "layer_types": kinds[: recipe["layers"]],
    }


def _experts(recipe: Recipe) -> dict[str, Any]:
    return {
        **_common(recipe),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": recipe["hidden"],
        "shared_expert_intermediate_size": recipe["hidden"],
    }


def _mixtral(recipe: Recipe) -> dict[str, Any]:
    return {
        **_with_head_size(recipe),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }


def _gpt2(recipe: Recipe) -> dict[str, Any]:
    return {
        "n_embd": recipe["hidden"],
        "n_layer": recipe["layers"],
        "n_head": recipe["heads"],
        "n_positions": recipe["positions"],
    }


def _opt(recipe: Recipe) -> dict[str, Any]:
    return {
        "hidden_size": recipe["hidden"],
        "word_embed_proj_dim": recipe["hidden"],
        "ffn_dim": 2 * recipe["hidden"],
        "num_hidden_layers": recipe["layers"],
        "num_attention_heads": recipe["heads"],
        "max_position_embeddings": recipe["positions"],
        "dropout": 0.0,
    }


def _falcon(recipe: Recipe) -> dict[str, Any]:
    return {
        "hidden_size": recipe["hidden"],
        "num_hidden_layers": recipe["layers"],
        "num_attention_heads": recipe["heads"],
        "num_kv_heads": recipe["kv_heads"],
        "ffn_hidden_size": 4 * recipe["hidden"],  # vLLM knows no other
        "max_position_embeddings": recipe["positions"],
        "new_decoder_architecture": True,
        "multi_query": False,
        "num_ln_in_parallel_attn": 2,
    }


def _bloom(recipe: Recipe) -> dict[str, Any]:
    return {
        "hidden_size": recipe["hidden"],
        "n_layer": recipe["layers"],
        "n_head": recipe["heads"],
    }


def _granite(recipe: Recipe) -> dict[str, Any]:
    # Away from 1, where they would not show.
    return {
        **_common(recipe),
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.75,
        "logits_scaling": 1.25,
        "attention_multiplier": 0.2,
    }


def _linear_attention(recipe: Recipe) -> dict[str, Any]:
    kinds = ["linear_attention", "full_attention"] * recipe["layers"]
    return {
        **_experts(recipe),
        "head_dim": recipe["hidden"] // recipe["heads"],
        "layer_types": kinds[: recipe["layers"]],
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    }


def _conv(recipe: Recipe) -> dict[str, Any]:
    kinds = ["conv", "full_attention"] * recipe["layers"]
    return {
        **_common(recipe),
        "layer_types": kinds[: recipe["layers"]],
        "conv_dim": recipe["hidden"],
        "block_dim": recipe["hidden"],
        "block_ff_dim": 2 * recipe["hidden"],
        "block_multiple_of": 32,
        "block_auto_adjust_ff_dim": False,
    }


def _mamba2(recipe: Recipe) -> dict[str, Any]:
    return {
        "hidden_size": recipe["hidden"],
        "num_hidden_layers": recipe["layers"],
        "num_heads": 4,
        "head_dim": recipe["hidden"] // 2,
        "state_size": 16,
        "n_groups": 1,
    }


def _deepseek(recipe: Recipe) -> dict[str, Any]:
    return {
        **_common(recipe),
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": recipe["hidden"],
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }


#: Name -> architecture, by its model type in transformers.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _common),
    "qwen2": Architecture("qwen2", _common, tied=True),
    "qwen3": Architecture("qwen3", _with_head_size, tied=True),
    "mistral": Architecture("mistral", _with_head_size),
    "gemma2": Architecture("gemma2", _gemma, tied=True),
    "gemma3_text": Architecture("gemma3_text", _gemma, tied=True),
    "phi3": Architecture("phi3", _common),
    "gpt2": Architecture("gpt2", _gpt2, tied=True, own_kv_heads=False),
    "opt": Architecture("opt", _opt, tied=True, own_kv_heads=False),
    "gpt_neox": Architecture("gpt_neox", _common, own_kv_heads=False),
    "falcon": Architecture("falcon", _falcon, tied=True),
    "bloom": Architecture("bloom", _bloom, tied=True, own_kv_heads=False),
    "granite": Architecture("granite", _granite),
    "mixtral": Architecture("mixtral", _mixtral),
    "qwen2_moe": Architecture("qwen2_moe", _experts),
    "olmoe": Architecture("olmoe", _experts),
    "olmo2": Architecture("olmo2", _common),
    "deepseek_v2": Architecture("deepseek_v2", _deepseek),
    "qwen3_next": Architecture("qwen3_next", _linear_attention),
    "lfm2": Architecture("lfm2", _conv, tied=True),
    "mamba2": Architecture("mamba2", _mamba2),
}
