"""Where the parts of an architecture's tree are, so that one probe serves them all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Layers of every checkpoint. At PP=2 the first two are on one stage and the last two on the other.
LAYERS = 4
EARLY, LATE = 1, 3


@dataclass(frozen=True)
class Anatomy:
    """Paths in vLLM's tree of one architecture.

    Attributes:
        layers: the list of layers.
        inner: modules inside a layer, in the order in which its forward finishes with them.
        mlp: the feed-forward part of a layer.
        norm, embed, head: the final norm, the token embedding, and what the logits are computed with.
        shared: a module that all layers share. nnsight knows it by its first path, and serves its first visit.
        pair: the output of ``mlp`` is the pair of a tensor and a bias.
        settings: engine arguments that the architecture needs.
        refused: layout -> words of the error with which the engine does not start.
        why: one line for the table.
    """

    layers: str = "model.layers"
    inner: tuple[str, ...] = (
        "self_attn.qkv_proj",
        "self_attn.attn",
        "self_attn.o_proj",
        "self_attn",
        "post_attention_layernorm",
        "mlp.gate_up_proj",
        "mlp.act_fn",
        "mlp.down_proj",
        "mlp",
    )
    mlp: str = "mlp"
    norm: str = "model.norm"
    embed: str = "model.embed_tokens"
    head: str = "lm_head"
    pair: bool = False
    shared: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    why: str = ""

    def layer(self, i: int) -> str:
        return f"{self.layers}.{i}"


_LLAMA = Anatomy().inner


def _experts(block: str) -> tuple[str, ...]:
    return (*_LLAMA[:5], f"{block}.gate", f"{block}.experts", block)


#: Name of `ppcore.vllm.checkpoints.ARCHITECTURES` -> anatomy.
ANATOMIES: dict[str, Anatomy] = {
    "llama": Anatomy(),
    "qwen2": Anatomy(why="tied: the embedding is on both stages"),
    "qwen3": Anatomy(
        inner=("self_attn.qkv_proj", "self_attn.q_norm", "self_attn.k_norm", *_LLAMA[1:]),
        why="tied",
    ),
    "mistral": Anatomy(),
    "gemma2": Anatomy(
        inner=(*_LLAMA[:5], "pre_feedforward_layernorm", *_LLAMA[5:], "post_feedforward_layernorm"),
        head="model.embed_tokens",
        why="no head of its own; local and global layers",
    ),
    "gemma3_text": Anatomy(
        inner=(
            "self_attn.qkv_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
            *_LLAMA[1:5],
            "pre_feedforward_layernorm",
            "mlp.gate_up_proj",
            "mlp.down_proj",
            "mlp",
            "post_feedforward_layernorm",
        ),
        shared="model.layers.0.mlp.act_fn",
        why="tied; one activation module shared by all layers",
    ),
    "phi3": Anatomy(),
    "gpt2": Anatomy(
        layers="transformer.h",
        inner=(
            "ln_1",
            "attn.c_attn",
            "attn.attn",
            "attn.c_proj",
            "attn",
            "ln_2",
            "mlp.c_fc",
            "mlp.c_proj",
            "mlp",
        ),
        norm="transformer.ln_f",
        embed="transformer.wte",
        shared="transformer.h.0.mlp.act",
        why="one activation module shared by all layers; weights stored as Conv1D",
    ),
    "opt": Anatomy(
        layers="model.decoder.layers",
        inner=(
            "self_attn_layer_norm",
            "self_attn.qkv_proj",
            "self_attn.attn",
            "self_attn.out_proj",
            "self_attn",
            "final_layer_norm",
            "fc1",
            "fc2",
        ),
        mlp="fc2",
        norm="model.decoder.final_layer_norm",
        embed="model.decoder.embed_tokens",
        shared="model.decoder.layers.0.activation_fn",
        pair=True,
        why="one activation module shared by all layers",
    ),
    "gpt_neox": Anatomy(
        inner=(
            "input_layernorm",
            "attention.query_key_value",
            "attention.dense",
            "attention",
            "post_attention_layernorm",
            "mlp.dense_h_to_4h",
            "mlp.act",
            "mlp.dense_4h_to_h",
            "mlp",
        ),
        norm="model.final_layer_norm",
        embed="model.embed_in",
        why="vLLM's Transformers backend",
    ),
    "olmo2": Anatomy(
        inner=(
            "self_attn.o_proj",
            "self_attn",
            "post_attention_layernorm",
            "mlp.down_proj",
            "mlp",
            "post_feedforward_layernorm",
        ),
        shared="model.layers.0.mlp.act_fn",
        why="vLLM's Transformers backend; one activation module shared by all layers",
    ),
    "falcon": Anatomy(
        layers="transformer.h",
        inner=(
            "ln_attn",
            "ln_mlp",
            "self_attention.query_key_value",
            "self_attention.attn",
            "self_attention.dense",
            "self_attention",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            "mlp",
        ),
        shared="transformer.h.0.mlp.act",
        norm="transformer.ln_f",
        embed="transformer.word_embeddings",
        pair=True,
        why="attention and MLP in parallel; outputs are pairs",
    ),
    "bloom": Anatomy(
        layers="transformer.h",
        inner=(
            "input_layernorm",
            "self_attention.query_key_value",
            "self_attention.attn",
            "self_attention.dense",
            "self_attention",
            "post_attention_layernorm",
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            "mlp",
        ),
        norm="transformer.ln_f",
        embed="transformer.word_embeddings",
        shared="transformer.h.0.mlp.gelu_impl",
        why="ALiBi; one activation module shared by all layers",
    ),
    "granite": Anatomy(why="embedding and head are built on the ranks that use them only"),
    "mixtral": Anatomy(
        inner=_experts("block_sparse_moe"), mlp="block_sparse_moe", why="mixture of experts"
    ),
    "qwen2_moe": Anatomy(inner=_experts("mlp"), why="mixture of experts with a shared one"),
    "olmoe": Anatomy(inner=_experts("mlp"), why="mixture of experts"),
    "deepseek_v2": Anatomy(
        inner=("self_attn", "post_attention_layernorm", "mlp"),
        # What it answers depends on which prompts share a step, on one stage too.
        settings={"max_num_seqs": 1},
        why="latent attention; modules reached by several paths; mixture of experts",
    ),
    "qwen3_next": Anatomy(
        inner=("post_attention_layernorm", "mlp"),
        settings={"dtype": "bfloat16"},
        why="linear and full attention in turn; the CPU kernels are for bfloat16",
    ),
    "lfm2": Anatomy(
        inner=("ffn_norm", "feed_forward"),
        mlp="feed_forward",
        norm="model.embedding_norm",
        # On one stage too, what a request's short convolutions make depends on which requests share its step.
        settings={"max_num_seqs": 1},
        why="short convolutions and attention in turn",
    ),
}
