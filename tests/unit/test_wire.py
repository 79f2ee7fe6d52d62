from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppcore import wire


@given(st.integers(0, wire.TEXT_LIMIT), st.integers(0, wire.PAYLOAD_LIMIT))
def test_a_header_says_what_was_put_into_it(text_bytes: int, payload_bytes: int) -> None:
    header = wire.header(text_bytes, payload_bytes)
    assert len(header) == wire.HEADER
    assert wire.sizes(header) == (text_bytes, payload_bytes)


def test_a_header_is_read_from_the_start_of_a_block() -> None:
    assert wire.sizes(wire.header(3, 5) + b"abc" + bytes(100)) == (3, 5)
    assert wire.sizes(memoryview(bytearray(wire.header(3, 5)))) == (3, 5)


def test_a_frame_that_fits_the_first_block_has_no_rest() -> None:
    room = wire.BLOCK - wire.HEADER
    assert wire.Sizes(room, 0).rest_bytes == 0
    assert wire.Sizes(room - 10, 10).rest_bytes == 0
    assert wire.Sizes(room - 10, 11).rest_bytes == 1
    assert wire.Sizes(0, 0).rest_bytes == 0


@pytest.mark.parametrize(
    ("text_bytes", "payload_bytes"),
    [(wire.TEXT_LIMIT + 1, 0), (0, wire.PAYLOAD_LIMIT + 1)],
    ids=["text", "payload"],
)
def test_a_part_over_its_limit_is_not_sent(text_bytes: int, payload_bytes: int) -> None:
    with pytest.raises(ValueError, match="over the limit"):
        wire.header(text_bytes, payload_bytes)


@pytest.mark.parametrize(
    ("text_bytes", "payload_bytes"),
    [(wire.TEXT_LIMIT + 1, 0), (0, wire.PAYLOAD_LIMIT + 1), (2**32 - 1, 2**64 - 1)],
    ids=["text", "payload", "both"],
)
def test_a_header_that_claims_too_much_is_refused(text_bytes: int, payload_bytes: int) -> None:
    magic = wire.header(0, 0)[:4]
    with pytest.raises(ValueError, match="is refused"):
        wire.sizes(struct.pack("<4sIQ", magic, text_bytes, payload_bytes))


@pytest.mark.parametrize("length", [0, 1, wire.HEADER - 1])
def test_a_block_too_short_for_a_header_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="a header has"):
        wire.sizes(wire.header(1, 1)[:length])


@given(st.binary(min_size=wire.HEADER, max_size=64).filter(lambda raw: raw[:4] != b"PPC1"))
def test_bytes_without_the_magic_are_no_frame(raw: bytes) -> None:
    with pytest.raises(ValueError, match="not a frame"):
        wire.sizes(raw)


@given(st.binary(max_size=40))
def test_any_bytes_after_the_magic_stay_within_the_limits_or_are_refused(raw: bytes) -> None:
    try:
        found = wire.sizes(b"PPC1" + raw)
    except ValueError:
        return
    assert 0 <= found.text_bytes <= wire.TEXT_LIMIT
    assert 0 <= found.payload_bytes <= wire.PAYLOAD_LIMIT
