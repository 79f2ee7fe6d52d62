"""Memory that large payloads are received into, used again once nobody holds it.

A fresh page costs a fault when it is first written, on a virtual machine more than the bytes that are
written to it: receiving 64 MiB into fresh memory takes more than twice as long as into memory that was
there. So a pool remembers what it gave out, up to a limit, and gives it out again when only the pool
refers to it. That needs no word from whoever held it: a tensor over the memory refers to its
`memoryview`, and that to the `mmap`, whose reference count the interpreter keeps.

The pages of fresh memory come into being as they are written, so that a peer that announces more than it
sends costs address space only.
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Sequence

#: The most that a process keeps for later, in bytes.
KEPT_BYTES = 256 * 1024**2

#: Sizes are multiples of this, the size of a huge page, from there on.
_HUGE = 2 * 1024**2


class Pool:
    """Memory to receive into.

    Args:
        kept_bytes: the most that is remembered, in use or not.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        # Invariant: the sizes add up to at most `kept_bytes`. Oldest first.
        self._known: list[mmap.mmap] = []
        self._unused = _references([mmap.mmap(-1, mmap.PAGESIZE)], 0)

    def take(self, count: int) -> memoryview:
        """Writable memory of so many bytes, at the beginning of a page; what it holds is undefined.

        Raises:
            OSError, ValueError, OverflowError: there is no address space for it.
        """
        if not count:
            return memoryview(bytearray())
        unit = mmap.PAGESIZE if count < _HUGE else _HUGE
        size = -(-count // unit) * unit
        with self._lock:
            for index in range(len(self._known)):
                fits = size <= len(self._known[index]) <= 2 * size
                if fits and _references(self._known, index) == self._unused:
                    self._known.append(self._known.pop(index))
                    return memoryview(self._known[-1])[:count]
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        if size <= self._kept_bytes:
            with self._lock:
                self._known.append(pages)
                while sum(map(len, self._known)) > self._kept_bytes:
                    self._known.pop(0)  # goes when its holder lets go
        return memoryview(pages)[:count]


def _references(known: Sequence[mmap.mmap], index: int) -> int:
    """How many references there are, counted the same way each time."""
    return sys.getrefcount(known[index])


#: What the transports of this process receive into.
POOL = Pool()
