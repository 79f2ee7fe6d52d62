"""Which rank died, for an error that says more than that the engine is dead.

When a rank dies vLLM ends the others and its engine core, and the client learns that the core is gone,
or, where it waits for the answer to a call at that moment, nothing. Nor does what it asks between the
rank's death and the core's. [`Deaths`][ppcore.vllm.deaths.Deaths]
watches the ranks' processes from the client: the first to go is the cause, and those that the engine
ends because of it come later. It sees processes of its own host and no others.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from ..errors import PeerDied

#: How soon what a death means is looked at again.
_AGAIN_S = 0.05


class Deaths:
    """Watches the processes of an engine's ranks.

    Args:
        ranks: of each rank its ``stage``, ``column`` and ``pid``, as `VLLM.pp_status` tells.
        then: called with the error when the first rank has died, on another thread: at once, and again
            until it returns that the client knows that the core is dead.
    """

    def __init__(
        self, ranks: Iterable[Mapping[str, int]], then: Callable[[PeerDied], bool]
    ) -> None:
        self._then = then
        self._first = ""
        self._known = threading.Event()
        self._watched: dict[int, str] = {}
        for rank in ranks:
            with contextlib.suppress(OSError):  # of another host
                handle = os.pidfd_open(rank["pid"])
                self._watched[handle] = f"stage {rank['stage']}, column {rank['column']}"
        threading.Thread(target=self._watch, name="ppcore deaths", daemon=True).start()

    def error(self, timeout_s: float = 5.0) -> PeerDied:
        """What to tell a client whose engine has died."""
        named = self._known.wait(timeout_s) if self._watched else False
        who = f"the rank of {self._first}" if named else "a rank, or the engine's core,"
        return PeerDied(f"{who} is gone: its process died; see the engine's log, and start it anew")

    def _watch(self) -> None:
        poll = select.poll()
        for handle in self._watched:
            poll.register(handle, select.POLLIN)
        if self._watched:
            self._first = "; ".join(self._watched[handle] for handle, _ in poll.poll())
            self._known.set()
            error = self.error()
            while not self._then(error):
                time.sleep(_AGAIN_S)
        for handle in self._watched:
            os.close(handle)
