"""Memory to receive into: used again when nobody holds it, and never before."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from ppcore.runtime.transport.memory import Pool

MIB = 1 << 20


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize("count", [1, 4096, 5000, 2 * MIB, 5 * MIB + 3])
def test_memory_is_as_long_as_asked_for_writable_and_at_a_page(count: int) -> None:
    found = Pool().take(count)
    assert (len(found), found.readonly, address(found) % 4096) == (count, False, 0)
    found[-1] = 1


def test_no_bytes_need_no_memory() -> None:
    assert len(Pool().take(0)) == 0


def test_what_a_view_or_a_tensor_holds_is_not_given_out_again() -> None:
    pool = Pool()
    first = pool.take(3 * MIB)
    tensor = torch.frombuffer(first[MIB:], dtype=torch.uint8)[5:].view(-1)
    where = address(first)
    del first  # only a view of a tensor over a part of it is left
    second = pool.take(3 * MIB)
    assert address(second) != where
    tensor.fill_(7)
    second[:] = bytes(3 * MIB)
    assert int(tensor.min()) == 7


def test_what_nobody_holds_is_given_out_again() -> None:
    pool = Pool()
    first = pool.take(3 * MIB)
    where = address(first)
    tensor = torch.frombuffer(first, dtype=torch.uint8)
    del first
    del tensor
    again = pool.take(3 * MIB)
    assert address(again) == where
    del again
    assert address(pool.take(2 * MIB + 1)) == where  # somewhat less fits too
    assert address(pool.take(100)) != where  # but is not wasted on little


def test_no_more_is_kept_than_the_limit() -> None:
    pool = Pool(kept_bytes=8 * MIB)
    held = [pool.take(4 * MIB) for _ in range(3)]
    places = [address(view) for view in held]
    assert sum(map(len, pool._known)) <= 8 * MIB
    held.clear()
    # The first was forgotten, the other two are known.
    again = [pool.take(4 * MIB), pool.take(4 * MIB)]
    assert {address(view) for view in again} == set(places[1:])
    pool.take(9 * MIB)
    assert sum(map(len, pool._known)) <= 8 * MIB


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises((OSError, OverflowError, ValueError)):
        Pool().take(1 << 62)
