from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppcore.runtime import codec

DTYPES = codec._DTYPES


def same(a: Any, b: Any) -> bool:
    """Equal in kind, structure and every bit."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*raw) if a.numel() else True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return struct.pack("<d", a) == struct.pack("<d", b) if isinstance(a, float) else a == b


def bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of every byte pattern that its size has room for, NaNs included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count) * 37 + 11).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(shape)


def test_the_dtypes_of_activations_are_all_known() -> None:
    wanted = "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 uint8 bool complex64"
    assert {getattr(torch, name) for name in wanted.split()} <= set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 4), (1, 1, 1, 2)], ids=str)
def test_every_dtype_and_shape_is_exact_to_the_bit(dtype: torch.dtype, shape: tuple) -> None:
    tensor = bits(dtype, *shape)
    found = codec.decode(codec.encode(tensor))
    assert same(tensor, found)
    assert found.is_contiguous()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2, 1:],
        lambda t: t.unsqueeze(0).expand(3, -1, -1),
        lambda t: t.as_strided((3, 3), (1, 1)),
    ],
    ids=["transposed", "strided", "expanded", "overlapping"],
)
def test_a_view_crosses_as_what_it_shows(view: Any) -> None:
    tensor = view(torch.arange(20.0).reshape(4, 5))
    found = codec.decode(codec.encode(tensor))
    assert torch.equal(found, tensor)
    assert found.is_contiguous()


def test_conjugated_and_negated_views_cross_as_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(codec.decode(codec.encode(tensor.conj())), tensor.conj().resolve_conj())
    negated = tensor.conj().imag
    assert negated.is_neg()
    assert codec.decode(codec.encode(negated)).tolist() == [-2, 4]


def test_what_arrives_is_memory_of_its_own() -> None:
    raw = codec.encode(torch.ones(4))
    found = codec.decode(raw)
    raw[-4:] = bytes(4)
    assert found.tolist() == [1, 1, 1, 1]
    found.zero_()


def test_a_tensor_with_gradients_crosses_without_them() -> None:
    found = codec.decode(codec.encode(torch.ones(2, requires_grad=True) * 2))
    assert not found.requires_grad
    assert found.tolist() == [2, 2]


VALUES = [
    None,
    True,
    False,
    0,
    -(1 << 63),
    (1 << 63) - 1,
    0.1,
    float("inf"),
    -0.0,
    "",
    "grün \U0001f600",
    (),
    [],
    {},
    (1, (2, [3, {"k": (None, True)}])),
    {"a": 1, 2: "b", None: [1.5]},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_keep_their_kind(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)


def test_a_decoder_layers_value_keeps_its_structure() -> None:
    value = (bits(torch.bfloat16, 7, 4), None, [bits(torch.int64, 3), {"aux": bits(torch.bool, 2)}])
    assert same(codec.decode(codec.encode(value)), value)


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)).map(
        lambda found: bits(found[0], *found[1])
    )
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(values)
def test_any_nest_of_values_comes_back_the_same(value: Any) -> None:
    assert same(codec.decode(codec.encode(value)), value)


@given(values)
def test_the_bytes_of_a_values_tensors_are_counted(value: Any) -> None:
    assert codec.size_bytes(value) <= len(codec.encode(value))
    assert codec.size_bytes([value, torch.zeros(3)]) == codec.size_bytes(value) + 12


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, b"x", 1j, [object()], torch.float32], ids=lambda v: type(v).__name__
)
def test_what_is_no_data_does_not_cross(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot cross between stages"):
        codec.encode(value)


def test_an_integer_beyond_64_bits_is_refused() -> None:
    with pytest.raises(TypeError, match="65 bits"):
        codec.encode(1 << 64)


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(TypeError):
        codec.encode(torch.eye(3).to_sparse())


# --- bytes that lie ---------------------------------------------------------------------------

SAMPLE = (torch.ones(2, 3), "text", [1, 2.5, None, {"k": torch.ones(1, dtype=torch.int64)}])


def test_every_truncation_is_refused() -> None:
    raw = bytes(codec.encode(SAMPLE))
    for length in range(len(raw)):
        with pytest.raises(ValueError):
            codec.decode(raw[:length])


def test_bytes_behind_the_value_are_refused() -> None:
    with pytest.raises(ValueError, match="1 bytes follow"):
        codec.decode(bytes(codec.encode(SAMPLE)) + b"N")


def tensor_header(dtype: bytes, shape: list[int], size: int) -> bytes:
    coded = b"t" + bytes([len(dtype)]) + dtype + bytes([len(shape)])
    return coded + b"".join(struct.pack("<q", n) for n in shape) + struct.pack("<Q", size)


LIES = {
    "unknown kind": b"?",
    "unknown dtype": tensor_header(b"float99", [1], 4) + bytes(4),
    "dtype that is a function": tensor_header(b"compile", [1], 4) + bytes(4),
    "dtype beyond ascii": tensor_header(b"\xff\xfe", [1], 4) + bytes(4),
    "huge tensor": tensor_header(b"float32", [1 << 40], 4 << 40),
    "shape larger than its size": tensor_header(b"float32", [1 << 40], 16) + bytes(16),
    "size larger than its shape": tensor_header(b"float32", [1], 8) + bytes(8),
    "negative extent": tensor_header(b"float32", [-1, -4], 16) + bytes(16),
    "product that overflows": tensor_header(b"float32", [1 << 32, 1 << 32], 0),
    "empty with huge extents": tensor_header(b"float32", [0, (1 << 63) - 1, (1 << 63) - 1], 0),
    "zero last with huge extents": tensor_header(b"float32", [1 << 62, 1 << 62, 0], 0),
    "too many dimensions": tensor_header(b"float32", [1] * 65, 4) + bytes(4),
    "list longer than the bytes": b"[" + struct.pack("<I", (1 << 32) - 1),
    "tuple longer than the bytes": b"(" + struct.pack("<I", 1 << 30) + b"N" * 100,
    "dict longer than the bytes": b"{" + struct.pack("<I", 1 << 30) + b"N" * 100,
    "string longer than the bytes": b"s" + struct.pack("<I", 1 << 31) + b"abc",
    "string that is no utf-8": b"s" + struct.pack("<I", 2) + b"\xff\xff",
    "key that cannot be one": b"{" + struct.pack("<I", 1) + b"[" + struct.pack("<I", 0) + b"N",
    "nested too deep": (b"(" + struct.pack("<I", 1)) * 3000 + b"N",
}


@pytest.mark.parametrize("raw", LIES.values(), ids=LIES)
def test_a_lie_is_refused_without_memory_for_it(raw: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            codec.decode(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=64))
def test_any_bytes_decode_or_are_refused_with_value_error(raw: bytes) -> None:
    try:
        codec.decode(raw)
    except ValueError:
        pass


@given(st.data())
def test_a_flipped_byte_is_decoded_or_refused_with_value_error(data: st.DataObject) -> None:
    raw = codec.encode(SAMPLE)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        codec.decode(raw)
    except ValueError:
        pass
