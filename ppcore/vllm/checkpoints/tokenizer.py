"""A byte-level tokenizer of any size, made of nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

# GPT-2's and Qwen2's name for it: their tokenizer classes add that one if it is missing, beyond the
# end of the vocabulary.
EOS = "<|endoftext|>"
EOS_ID = 0
BYTES = 256
# By frequency in English, so that a small vocabulary gets the pairs that text is made of.
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def merge_count() -> int:
    return (1 + len(_LETTERS)) * len(_LETTERS) * (1 + len(_LETTERS))


def merges() -> Iterator[tuple[str, str]]:
    """Pairs of a space or letter and a letter, the frequent ones first; then a third letter."""
    rank = {letter: n for n, letter in enumerate(_LETTERS)}
    rank["Ġ"] = 0  # how byte-level BPE spells a space
    pairs = [(left, right) for left in rank for right in _LETTERS]
    pairs.sort(key=lambda pair: (rank[pair[0]] + rank[pair[1]], pair))
    yield from pairs
    for left, right in pairs:
        for third in _LETTERS:
            yield left + right, third


def tokenizer(vocab: int, positions: int) -> Any:
    """A tokenizer of `vocab` entries: the end token, the bytes, then merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = list(islice(merges(), vocab - BYTES - 1))
    words = [EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, pairs)]
    bpe = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, pairs))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        bos_token=EOS,
        pad_token=EOS,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
