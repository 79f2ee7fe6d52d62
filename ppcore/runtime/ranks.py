"""What ranks tell each other before there is a transport, and what those of one machine have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in the order of the ranks of ``group`` (all ranks without one).

    Collective. Values are pickled: for what ranks agree on at load, before any request is served.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def boot_id() -> str:
    """What names this machine's run since it started, the same for all of its processes.

    Raises:
        OSError: the system names none.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
