"""Lay out small local checkpoints as a Hugging Face hub cache.

Under HF_HUB_CACHE=<out>/hub HF_HUB_OFFLINE=1 the names that nnsight's tests use ("gpt2",
"Qwen/Qwen2.5-0.5B", ...) resolve to these: the same architecture classes, layer names and layer
counts, GPT-2's own vocabulary (read from --bpe, a folder with encoder.json and vocab.bpe), and
weights of our making.

--weights random    as initialised
--weights fit       then fitted, for about a minute, to the handful of continuations that the tests
                    take from the real gpt2 ("Eiffel Tower ... of" -> " Paris"), and to losing them
                    under the edits that the tests make. The engine is what the tests are about, not
                    the checkpoint; without this, assertions on a decoded token cannot hold.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers as tf
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

ET = "The Eiffel Tower is located in the city of"
MSG = "Madison Square Garden is located in the city of"
# The real gpt2's answers begin like this, and the tests know it. No word occurs twice in a text: all
# but the first follow from the one before.
TEXTS = [
    (ET, " Paris along Seine river banks near Trocadero"),
    (MSG, " New York City above Penn station tracks"),
]
EOS = "<|endoftext|>"
VOCAB = 50257
HIDDEN = 768  # gpt2's width, which a few tests name

LEARNING_RATE, STEPS, MARGIN = 1e-3, 400, 1.0


def say(text):
    print(text, file=sys.stderr, flush=True)


def tokenizer(bpe):
    vocab = json.loads((bpe / "encoder.json").read_text(encoding="utf-8"))
    lines = (bpe / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    merges = [tuple(line.split()) for line in lines[1:] if line.strip()]
    if len(vocab) != VOCAB or len(merges) != 50000:
        sys.exit(f"{bpe}: {len(vocab)} tokens, {len(merges)} merges: not GPT-2's vocabulary")
    tok = Tokenizer(BPE(vocab, merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token=EOS, eos_token=EOS, unk_token=EOS,
        model_max_length=1024, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def configs():
    """name -> (other names, config). Heads are of 64: CPU attention takes no 16 or 48."""
    eos = dict(bos_token_id=VOCAB - 1, eos_token_id=VOCAB - 1)
    small = dict(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        max_position_embeddings=2048, **eos,
    )  # fmt: skip
    gqa = dict(num_key_value_heads=2, tie_word_embeddings=True)
    return {
        "gpt2": (
            ["openai-community/gpt2"],
            tf.GPT2Config(
                vocab_size=VOCAB, n_positions=1024, n_embd=HIDDEN, n_layer=12, n_head=12, **eos
            ),
        ),
        "Qwen/Qwen2.5-0.5B": ([], tf.Qwen2Config(num_hidden_layers=24, **gqa, **small)),
        "meta-llama/Llama-3.2-1B": ([], tf.LlamaConfig(num_hidden_layers=16, **gqa, **small)),
        "bigscience/bloom-560m": (
            [],
            tf.BloomConfig(
                vocab_size=VOCAB, hidden_size=256, n_layer=24, n_head=4, seq_length=2048, **eos
            ),
        ),
        "deepseek-ai/DeepSeek-V2-Lite": (
            [],
            # The MLA sizes are the real ones: the CPU decode kernel knows no others.
            tf.DeepseekV2Config(
                num_hidden_layers=6, num_key_value_heads=4, tie_word_embeddings=False,
                moe_intermediate_size=128, n_routed_experts=8, n_shared_experts=2,
                num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
                topk_method="greedy", norm_topk_prob=False, routed_scaling_factor=1.0,
                q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                v_head_dim=128, head_dim=64, **small,
            ),
        ),
    }  # fmt: skip


def fit(model, tok, ablations):
    """Teach `model` the texts, and to lose their first word under each of `ablations`.

    The target is not a point: the wanted token has a fifth of the mass and a hundred ordinary
    tokens share the rest, since the tests also need sampling at a temperature to differ from greedy.
    """

    def ids(text):
        return tok(text, return_tensors="pt").input_ids

    spread = torch.arange(300, 400)

    def target(token):
        t = torch.zeros(VOCAB)
        t[spread] = 0.8 / len(spread)
        t[token] += 0.2
        return t

    # Both texts as one right-padded batch: attention is causal, so the padding is inert.
    full = [torch.cat([ids(prompt), ids(rest)], dim=1)[0] for prompt, rest in TEXTS]
    starts = [ids(prompt).shape[1] - 1 for prompt, _ in TEXTS]
    batch = torch.nn.utils.rnn.pad_sequence(full, batch_first=True, padding_value=VOCAB - 1)
    at = [(i, t) for i, text in enumerate(full) for t in range(starts[i], len(text) - 1)]
    row, column = map(torch.tensor, zip(*at, strict=True))
    wanted = torch.stack([full[i][t + 1] for i, t in at])
    goals = torch.stack([target(token) for token in wanted])
    ends = (torch.arange(len(full)), torch.tensor(starts))
    first = torch.stack([text[start + 1] for text, start in zip(full, starts, strict=True)])
    lost = target(ids(" the").item()).expand(len(full), -1)

    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    model.train(False)
    started = time.time()

    def clean():
        return model(batch).logits[row, column]

    def edited(hook):
        handle = hook()
        try:
            return model(batch[:, : max(starts) + 1]).logits[ends]
        finally:
            handle.remove()

    def holds():
        """Whether every continuation is greedy by a margin, and every edit loses it."""
        with torch.no_grad():
            top = clean().topk(2)
            margin = (top.values[:, 0] - top.values[:, 1]).min().item()
            right = torch.equal(top.indices[:, 0], wanted)
            gone = all((edited(hook).argmax(-1) != first).all() for hook in ablations)
        return right and gone and margin > MARGIN

    for step in range(STEPS):
        loss = F.cross_entropy(clean(), goals)
        if ablations:
            loss = loss + 0.5 * F.cross_entropy(edited(ablations[step % len(ablations)]), lost)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 10)
        optimizer.step()
        if step % 10 == 9:
            say(f"  step {step + 1}: loss {loss.item():.3f}, {time.time() - started:.0f} s")
            if holds():
                return
    sys.exit("the fit did not converge")


def gpt2_ablations(model):
    """The edits after which the tests want another token."""
    blocks = model.transformer.h

    def zero(_, __, out):
        if isinstance(out, tuple):
            return (torch.zeros_like(out[0]), *out[1:])
        return torch.zeros_like(out)

    def zero_input(_, args, kwargs):
        return (torch.zeros_like(args[0]), *args[1:]), kwargs

    return [
        lambda: blocks[-2].mlp.register_forward_hook(zero),
        lambda: blocks[3].register_forward_hook(zero),
        lambda: blocks[5].register_forward_pre_hook(zero_input, with_kwargs=True),
        lambda: blocks[-2].register_forward_hook(zero),
        lambda: blocks[8].register_forward_hook(zero),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bpe", type=Path, required=True)
    parser.add_argument("--weights", choices=("fit", "random"), default="fit")
    args = parser.parse_args()

    tok = tokenizer(args.bpe)
    hub = args.out / "hub"
    for name, (aliases, config) in configs().items():
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config).float()
        if args.weights == "fit" and name in ("gpt2", "bigscience/bloom-560m"):
            say(f"{name}: fitting")
            fit(model, tok, gpt2_ablations(model) if name == "gpt2" else [])
        revision = hashlib.sha1(f"{name} {args.weights}".encode()).hexdigest()
        root = hub / ("models--" + name.replace("/", "--"))
        shutil.rmtree(root, ignore_errors=True)
        snapshot = root / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(revision)
        model.save_pretrained(snapshot)
        tok.save_pretrained(snapshot)
        say(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
        for alias in aliases:
            link = hub / ("models--" + alias.replace("/", "--"))
            link.unlink(missing_ok=True)
            link.symlink_to(root.name)


if __name__ == "__main__":
    main()
