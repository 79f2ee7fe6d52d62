"""Values as bytes, exact to the bit: tensors of any dtype, nested tuples, lists, dicts, plain leaves.

One byte says what follows. A tensor carries its dtype, its shape and its bytes; the receiver guesses
nothing and allocates nothing that the bytes at hand do not cover. Nothing is pickled.

A large tensor is not copied on either side. [`pieces`][ppcore.runtime.codec.pieces] names its memory, to
be sent from where it lies; [`decode`][ppcore.runtime.codec.decode] gives out a tensor over the memory
that it was received into. For that its bytes begin at a multiple of 64 from the value's first.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import numpy
import torch

_DTYPES = [
    dtype
    for name in (
        "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 "
        "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz uint16 uint32 uint64 float8_e8m0fnu"
    ).split()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
]


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls a dtype."""
    return str(dtype).removeprefix("torch.")


_NAMES = {dtype: dtype_name(dtype) for dtype in _DTYPES}
_BY_NAME = {name: dtype for dtype, name in _NAMES.items()}

#: Dtypes that numpy does not have -> one of as many bits. torch neither conjugates nor negates these lazily.
_BITS = {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.int8
    for dtype in _DTYPES
    if dtype is torch.bfloat16 or "float8" in _NAMES[dtype]
}

_TENSOR = ord("t")
_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_U64 = struct.Struct("<Q")

#: A tensor of so many bytes or more is not copied, and is aligned to so many.
SHARED = 64 * 1024
_ALIGNMENT = 64

#: Most dimensions and deepest nesting that are accepted.
_DIMENSIONS = 64
_DEPTH = 64


def pieces(value: Any) -> list[bytearray | memoryview]:
    """``value`` as bytes, in pieces to be joined; those of large tensors are the tensors' own memory.

    Raises:
        TypeError: there is something in it that is not data.
    """
    out = _Pieces()
    _encode(value, out)
    return [*out.ended, out.last] if out.last else out.ended


def encode(value: Any) -> bytearray:
    """``value`` as bytes in one piece; see `pieces`."""
    return bytearray().join(pieces(value))


class _Pieces:
    """What `pieces` collects: those that have ended, and the last, which grows."""

    def __init__(self) -> None:
        self.ended: list[bytearray | memoryview] = []
        self.last = bytearray()
        self._ended_bytes = 0

    def __iadd__(self, more: bytes) -> _Pieces:
        self.last += more
        return self

    def end_with(self, raw: memoryview) -> None:
        """Add bytes as a piece of their own, aligned."""
        self.last += bytes(-(self._ended_bytes + len(self.last)) % _ALIGNMENT)
        self.ended += [self.last, raw]
        self._ended_bytes += len(self.last) + len(raw)
        self.last = bytearray()


def size_bytes(value: Any) -> int:
    """The bytes of the tensors in ``value``."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(size_bytes(item) for item in value)
    if isinstance(value, dict):
        return sum(size_bytes(item) for item in value.values())
    return 0


def _encode(value: Any, out: _Pieces) -> None:
    if isinstance(value, torch.Tensor):
        _encode_tensor(value, out)
    elif value is None:
        out += b"N"
    elif isinstance(value, bool):
        out += b"T" if value else b"F"
    elif isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise TypeError(f"an int of {value.bit_length()} bits cannot cross between stages")
        out += b"i" + _I64.pack(value)
    elif isinstance(value, float):
        out += b"f" + _F64.pack(value)
    elif isinstance(value, str):
        raw = value.encode()
        out += b"s" + _U32.pack(len(raw)) + raw
    elif isinstance(value, (tuple, list)):
        out += (b"(" if isinstance(value, tuple) else b"[") + _U32.pack(len(value))
        for item in value:
            _encode(item, out)
    elif isinstance(value, dict):
        out += b"{" + _U32.pack(len(value))
        for key, item in value.items():
            _encode(key, out)
            _encode(item, out)
    else:
        raise TypeError(f"a {type(value).__name__} cannot cross between stages")


@lru_cache(maxsize=256)
def _described(name: str, shape: tuple[int, ...], size: int) -> bytes:
    """A tensor up to its bytes."""
    coded = name.encode()
    return struct.pack(
        f"<cB{len(coded)}sB{len(shape)}qQ", b"t", len(coded), coded, len(shape), *shape, size
    )


def _encode_tensor(tensor: torch.Tensor, out: _Pieces) -> None:
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of {tensor.dtype}, {tensor.layout} cannot cross between stages")
    array = _as_array(tensor)
    size = array.nbytes
    out += _described(name, array.shape, size)
    if size < SHARED:
        out += array.tobytes()
    else:
        out.end_with(memoryview(array.reshape(-1).view(numpy.uint8)))


def _as_array(tensor: torch.Tensor) -> Any:
    """The tensor's numbers, or its bits, over the same memory where that is the host's.

    A call into torch takes a microsecond, and five where the processor has not seen its code for a while;
    so numpy is asked what torch would be, and torch only after numpy has refused.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.to("cpu")
    bits = _BITS.get(tensor.dtype)
    if bits is not None:
        return tensor.view(bits).numpy()
    try:
        return tensor.numpy()
    except RuntimeError:  # lazily conjugated or negated
        return tensor.resolve_conj().resolve_neg().numpy()


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The value that ``data`` holds. Its large tensors may lie in ``data``, which is given away.

    Raises:
        ValueError: the bytes hold no value, or lie about its size.
    """
    view = memoryview(data)
    try:
        value, position = _decode(view, 0, 0)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError("a value that ends early") from error
    except (TypeError, RuntimeError) as error:  # a list as a key; extents that torch cannot count
        raise ValueError(f"not a value: {error}") from error
    if position != len(view):
        raise ValueError(f"{len(view) - position} bytes follow the value")
    return value


def _decode(view: memoryview, at: int, depth: int) -> tuple[Any, int]:
    if depth > _DEPTH:
        raise ValueError(f"a value nested deeper than {_DEPTH}")
    kind = view[at]
    at += 1
    if kind == _TENSOR:
        return _decode_tensor(view, at)
    match chr(kind):
        case "N":
            return None, at
        case "T":
            return True, at
        case "F":
            return False, at
        case "i":
            return _I64.unpack_from(view, at)[0], at + 8
        case "f":
            return _F64.unpack_from(view, at)[0], at + 8
        case "s":
            length = _U32.unpack_from(view, at)[0]
            _within(view, at + 4, length)
            return str(view[at + 4 : at + 4 + length], "utf-8"), at + 4 + length
        case "(" | "[":
            count = _U32.unpack_from(view, at)[0]
            _within(view, at + 4, count)
            at += 4
            items = []
            for _ in range(count):
                item, at = _decode(view, at, depth + 1)
                items.append(item)
            return (tuple(items) if kind == ord("(") else items), at
        case "{":
            count = _U32.unpack_from(view, at)[0]
            _within(view, at + 4, count)
            at += 4
            made = {}
            for _ in range(count):
                key, at = _decode(view, at, depth + 1)
                made[key], at = _decode(view, at, depth + 1)
            return made, at
    raise ValueError(f"{chr(kind)!r} begins no value")


def _within(view: memoryview, at: int, length: int) -> None:
    if at + length > len(view):
        raise ValueError(f"a part of {length} bytes in {len(view) - at}")


def _decode_tensor(view: memoryview, at: int) -> tuple[torch.Tensor, int]:
    end = at + 1 + view[at]
    begin, end = at, end + 1 + 8 * view[end] + 8
    _within(view, begin, end - begin)
    dtype, shape, size = _description(bytes(view[begin:end]))
    at = end
    if size >= SHARED:
        at += -at % _ALIGNMENT
    _within(view, at, size)
    if not size:
        return torch.empty(shape, dtype=dtype), at
    raw: memoryview | bytearray = view[at : at + size]
    if size < SHARED or view.readonly:
        raw = bytearray(raw)
    tensor = torch.frombuffer(raw, dtype=dtype)
    if size >= SHARED and tensor.data_ptr() % _ALIGNMENT:
        tensor = tensor.clone()
    return tensor if len(shape) == 1 else tensor.reshape(shape), at + size


@lru_cache(maxsize=256)
def _description(raw: bytes) -> tuple[torch.dtype, tuple[int, ...], int]:
    """A tensor's dtype, shape and size in bytes, as `_described` wrote them after the first byte."""
    name = str(raw[1 : 1 + raw[0]], "ascii")
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise ValueError(f"{name!r} is no dtype")
    at = 1 + raw[0]
    dimensions = raw[at]
    if dimensions > _DIMENSIONS:
        raise ValueError(f"a tensor of {dimensions} dimensions")
    *shape, size = struct.unpack_from(f"<{dimensions}qQ", raw, at + 1)
    count = 1
    for extent in shape:
        if extent < 0:
            raise ValueError(f"a tensor of shape {tuple(shape)}")
        count *= extent
    if count * dtype.itemsize != size:
        raise ValueError(f"a tensor of shape {tuple(shape)} and {dtype} does not have {size} bytes")
    return dtype, tuple(shape), size
