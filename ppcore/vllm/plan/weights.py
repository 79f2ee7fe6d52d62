"""The weights of an architecture, computed from the sizes in its configuration.

A `Family` lists a model's weights in four parts: embedding, layers, norm and head. Each `Weight` says
what tensor-parallel columns divide of it: attention heads, key-value heads, the width of the MLP, the
vocabulary; or nothing, and then every column has all of it. A column's share follows vLLM: key-value
heads are copied where there are more columns than heads, and the rows of the vocabulary are padded to
a multiple of 64 before they are divided.

Some of vLLM's models build the embedding, the norm or the head on every stage, though one stage uses
it. A family names those parts, because they count in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from .config import Config

PARTS = ("embedding", "layers", "norm", "head")

_VOCAB_PADDING = 64


@dataclass(frozen=True)
class Weight:
    """Some parameters that columns divide alike."""

    name: str
    count: int
    #: What columns divide: "heads", "key-value heads", "width", "vocabulary"; "" where nothing.
    axis: str = ""
    #: How many of them there are.
    units: int = 0

    def per_column(self, columns: int) -> int:
        """Parameters that vLLM allocates on each of so many columns."""
        if not self.axis:
            return self.count
        units = padded_vocab(self.units) if self.axis == "vocabulary" else self.units
        return self.count // self.units * max(1, units // columns)

    def fits(self, columns: int) -> bool:
        """Whether so many columns can divide it."""
        if not self.axis:
            return True
        units = padded_vocab(self.units) if self.axis == "vocabulary" else self.units
        return units % columns == 0 or (self.axis == "key-value heads" and columns % units == 0)


def padded_vocab(size: int) -> int:
    """Rows of an embedding in vLLM."""
    return -(-size // _VOCAB_PADDING) * _VOCAB_PADDING


@dataclass(frozen=True)
class Weights:
    """The weights of one model."""

    embedding: tuple[Weight, ...]
    layers: tuple[tuple[Weight, ...], ...]
    norm: tuple[Weight, ...]
    #: The output matrix; where it is tied, a copy of the embedding's table is used in its place.
    head: tuple[Weight, ...]
    tied: bool
    #: Parts that vLLM builds on every stage, used there or not.
    everywhere: frozenset[str]

    def part(self, name: str) -> tuple[Weight, ...]:
        """The weights of a part other than "layers"."""
        found: tuple[Weight, ...] = getattr(self, name)
        return found

    def total(self) -> int:
        """Parameters of the model, each counted once: those of its checkpoint."""
        head = () if self.tied else self.head
        parts = (self.embedding, *self.layers, self.norm, head)
        return sum(weight.count for part in parts for weight in part)


@dataclass(frozen=True)
class Family:
    """How to compute the weights of an architecture."""

    layer: Callable[[Config, int], list[Weight]]
    tied: bool = False
    everywhere: tuple[str, ...] = ()
    embedding: Callable[[Config], list[Weight]] = lambda c: []
    norm_bias: bool = False

    def weights(self, c: Config) -> Weights:
        hidden, vocab = c.size("hidden"), c.size("vocab")
        tied = bool(c.get("tie_word_embeddings", c.whole.get("tie_word_embeddings", self.tied)))
        width = c.get("word_embed_proj_dim", hidden)  # OPT's
        table = Weight("token table", vocab * width, "vocabulary", vocab)
        final = c.get("do_layer_norm_before", True)  # OPT's
        return Weights(
            embedding=(table, *self.embedding(c)),
            layers=tuple(tuple(self.layer(c, n)) for n in range(c.size("layers"))),
            norm=(_norm("final norm", hidden, self.norm_bias),) if final else (),
            head=(Weight("output matrix", vocab * width, "vocabulary", vocab),),
            tied=tied,
            everywhere=frozenset(self.everywhere),
        )


def weights(config: Config) -> Weights | None:
    """The weights of a configuration's language model; None for an architecture not known here."""
    name = config.architecture
    if config.part:
        name = LANGUAGE_MODELS.get(str(config.get("model_type")), "")
    family = FAMILIES.get(name)
    return family.weights(config) if family else None


# --- pieces of a layer ------------------------------------------------------------------------


def _norm(name: str, size: int, bias: bool = False) -> Weight:
    return Weight(name, size * (2 if bias else 1))


def _head_size(c: Config) -> int:
    return int(c.get("head_dim", c.size("hidden") // c.size("heads")))


def _attention(
    c: Config,
    *,
    kv_heads: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> list[Weight]:
    hidden, heads, size = c.size("hidden"), c.size("heads"), _head_size(c)
    kv = kv_heads or c.size("kv_heads", heads)
    rows = hidden + (1 if qkv_bias else 0)
    found = [
        Weight("query", rows * heads * size, "heads", heads),
        Weight("key and value", 2 * rows * kv * size, "key-value heads", kv),
        Weight("attention output", hidden * heads * size, "heads", heads),
    ]
    if out_bias:
        found.append(Weight("attention output bias", hidden))
    if qk_norm:
        found.append(_norm("query and key norms", 2 * size))
    return found


def _mlp(hidden: int, width: int, *, gated: bool = True, bias: bool = False) -> list[Weight]:
    inward = (2 if gated else 1) * width * (hidden + (1 if bias else 0))
    found = [Weight("mlp", inward + width * hidden, "width", width)]
    if bias:
        found.append(Weight("mlp output bias", hidden))
    return found


def _experts(hidden: int, width: int, experts: int) -> list[Weight]:
    return [
        Weight("router", experts * hidden),
        Weight("experts", 3 * experts * hidden * width, "width", width),
    ]


# --- layers -----------------------------------------------------------------------------------


def _dense(
    c: Config,
    n: int,
    *,
    qkv_bias: bool | None = None,
    qk_norm: bool = False,
    norms: int = 2,
) -> list[Weight]:
    """Llama and its kin: RMS norms, rotary attention, a gated MLP."""
    hidden = c.size("hidden")
    asked = bool(c.get("attention_bias", False))
    attention = _attention(
        c,
        qkv_bias=asked if qkv_bias is None else qkv_bias,
        out_bias=asked if qkv_bias is None else False,
        qk_norm=qk_norm,
    )
    mlp = _mlp(hidden, c.size("intermediate"), bias=bool(c.get("mlp_bias", False)))
    return [*attention, *mlp, _norm("norms", norms * hidden)]


def _classic(c: Config, n: int, *, bias: bool | None = None, norms: int = 2) -> list[Weight]:
    """GPT-2 and its kin: layer norms, biases, an MLP without a gate, usually 4 times as wide."""
    hidden = c.size("hidden")
    bias = bool(c.get("use_bias", True)) if bias is None else bias
    return [
        *_attention(c, qkv_bias=bias, out_bias=bias),
        *_mlp(hidden, c.size("intermediate", 4 * hidden), gated=False, bias=bias),
        _norm("norms", norms * hidden, bias=True),
    ]


def _opt(c: Config, n: int) -> list[Weight]:
    return _classic(c, n, bias=bool(c.get("enable_bias", True)))


def _falcon(c: Config, n: int) -> list[Weight]:
    hidden, heads, bias = c.size("hidden"), c.size("heads"), bool(c.get("bias", False))
    new = bool(c.get("new_decoder_architecture", False))
    if new:
        kv = int(c.get("num_kv_heads", heads))
        norms = int(c.get("num_ln_in_parallel_attn", 2))
    else:
        kv = 1 if c.get("multi_query", True) else heads
        norms = 1 if c.get("parallel_attn", True) else 2
    return [
        *_attention(c, kv_heads=kv, qkv_bias=bias, out_bias=bias),
        *_mlp(hidden, int(c.get("ffn_hidden_size", 4 * hidden)), gated=False, bias=bias),
        _norm("norms", norms * hidden, bias=True),
    ]


def _mixtral(c: Config, n: int) -> list[Weight]:
    hidden = c.size("hidden")
    experts = c.size("experts")
    return [
        *_attention(c),
        *_experts(hidden, c.size("intermediate"), experts),
        _norm("norms", 2 * hidden),
    ]


def _qwen_moe(c: Config, n: int, *, qkv_bias: bool, qk_norm: bool) -> list[Weight]:
    hidden, experts = c.size("hidden"), c.size("experts", 0)
    step = int(c.get("decoder_sparse_step", 1))
    found = _attention(c, qkv_bias=qkv_bias, qk_norm=qk_norm)
    if experts and n not in c.get("mlp_only_layers", []) and (n + 1) % step == 0:
        found += _experts(hidden, int(c.get("moe_intermediate_size", 0)), experts)
        if shared := int(c.get("shared_expert_intermediate_size", 0)):
            found += [*_mlp(hidden, shared), Weight("shared expert's gate", hidden)]
    else:
        found += _mlp(hidden, c.size("intermediate"))
    return [*found, _norm("norms", 2 * hidden)]


def _deepseek(c: Config, n: int) -> list[Weight]:
    """Latent attention, and experts beside shared ones after the first layers."""
    hidden, heads = c.size("hidden"), c.size("heads")
    rope, nope, value = (
        int(c.get(key, default))
        for key, default in (
            ("qk_rope_head_dim", 64),
            ("qk_nope_head_dim", 128),
            ("v_head_dim", 128),
        )
    )
    latent, query = int(c.get("kv_lora_rank", 512)), c.get("q_lora_rank")
    found = [
        Weight("latent projections", hidden * (latent + rope) + latent),
        Weight("key and value", latent * heads * (nope + value), "heads", heads),
        Weight("attention output", heads * value * hidden, "heads", heads),
    ]
    if query is None:
        found.append(Weight("query", hidden * heads * (nope + rope), "heads", heads))
    else:
        found.append(Weight("latent query", hidden * query + query))
        found.append(Weight("query", query * heads * (nope + rope), "heads", heads))
    experts = int(c.get("n_routed_experts", 0))
    dense = int(c.get("first_k_dense_replace", 0))
    if experts and n >= dense and n % int(c.get("moe_layer_freq", 1)) == 0:
        width = int(c.get("moe_intermediate_size", 0))
        found += _experts(hidden, width, experts)
        if c.get("topk_method") == "noaux_tc":
            found.append(Weight("router's correction", experts))
        if shared := int(c.get("n_shared_experts", 0)):
            found += _mlp(hidden, shared * width)
    else:
        found += _mlp(hidden, c.size("intermediate"))
    return [*found, _norm("norms", 2 * hidden)]


# --- embeddings beside the token table ----------------------------------------------------------


def _positions(c: Config, more: int = 0) -> list[Weight]:
    found = [Weight("positions", (c.size("positions", 1024) + more) * c.size("hidden"))]
    width = c.get("word_embed_proj_dim", c.size("hidden"))
    if width != c.size("hidden"):
        found.append(Weight("projections to and from it", 2 * width * c.size("hidden")))
    return found


def _bloom_embedding(c: Config) -> list[Weight]:
    return [_norm("embedding's norm", c.size("hidden"), bias=True)]


# --- architectures ----------------------------------------------------------------------------

_EMBEDDING_AND_NORM = ("embedding", "norm")
_ALL = ("embedding", "norm", "head")

_LLAMA = Family(_dense)
_GEMMA2 = Family(partial(_dense, norms=4), tied=True, everywhere=_EMBEDDING_AND_NORM)

FAMILIES: dict[str, Family] = {
    "BloomForCausalLM": Family(
        partial(_classic, bias=True),
        tied=True,
        everywhere=_EMBEDDING_AND_NORM,
        embedding=_bloom_embedding,
        norm_bias=True,
    ),
    "DeepseekV2ForCausalLM": Family(_deepseek),
    "DeepseekV3ForCausalLM": Family(_deepseek),
    "FalconForCausalLM": Family(_falcon, tied=True, everywhere=_EMBEDDING_AND_NORM, norm_bias=True),
    "GPT2LMHeadModel": Family(
        partial(_classic, bias=True),
        tied=True,
        everywhere=_EMBEDDING_AND_NORM,
        embedding=_positions,
        norm_bias=True,
    ),
    "GPTNeoXForCausalLM": Family(partial(_classic, bias=True), norm_bias=True),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": Family(
        partial(_dense, norms=4, qk_norm=True), tied=True, everywhere=_EMBEDDING_AND_NORM
    ),
    "GemmaForCausalLM": Family(_dense, tied=True, everywhere=_EMBEDDING_AND_NORM),
    "GraniteForCausalLM": _LLAMA,
    "GraniteMoeForCausalLM": Family(_mixtral, everywhere=_ALL),
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "MixtralForCausalLM": Family(_mixtral, everywhere=_ALL),
    "OPTForCausalLM": Family(
        _opt,
        tied=True,
        everywhere=_EMBEDDING_AND_NORM,
        embedding=partial(_positions, more=2),
        norm_bias=True,
    ),
    "Phi3ForCausalLM": Family(partial(_dense, qkv_bias=False)),
    "Qwen2ForCausalLM": Family(partial(_dense, qkv_bias=True)),
    "Qwen2MoeForCausalLM": Family(
        partial(_qwen_moe, qkv_bias=True, qk_norm=False), everywhere=_ALL
    ),
    "Qwen3ForCausalLM": Family(partial(_dense, qk_norm=True)),
    "Qwen3MoeForCausalLM": Family(
        partial(_qwen_moe, qkv_bias=False, qk_norm=True), everywhere=_ALL
    ),
    "SmolLM3ForCausalLM": Family(_dense, tied=True),
    "Starcoder2ForCausalLM": Family(_classic, tied=True, norm_bias=True),
}

#: `model_type` of a model's language part -> the architecture that it has.
LANGUAGE_MODELS = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
