"""A rank's process ends with the engine that started it, whatever it is at.

vLLM ends its ranks, and a rank whose engine core is gone ends by itself, at its next call. One that waits for
another rank's hidden states on a CPU does so in a loop of vLLM's C++, which nothing but a signal ends: when
the other rank has failed meanwhile, it would keep a core busy until the machine is restarted.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

#: How long a rank has to end by itself, in seconds.
GRACE_S = 5.0


def end_with_parent(grace_s: float = GRACE_S) -> None:
    """End this process so long after the one that started it is gone.

    Does nothing in a process that `multiprocessing` did not start: who is to end that is not known.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="ppcore orphan", daemon=True).start()
