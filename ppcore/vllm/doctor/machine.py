"""The machine as a CPU engine sees it: cores and their binding, memory, shared memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from .finding import Finding, note, ok, problem

GIB = 1 << 30
MIB = 1 << 20

#: What the processes of one rank take before any weights: PyTorch and vLLM themselves.
RANK_BYTES = 1 * GIB

#: What a container gets by default is 64 MiB. vLLM's queue to its workers has ten messages of up
#: to 16 MiB each.
SHM_BYTES = 160 * MIB

_BIND = "VLLM_CPU_OMP_THREADS_BIND"
_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def cores() -> list[int]:
    """The cores that this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return list(range(os.cpu_count() or 1))


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> int:
    """Memory nodes of the machine; 1 where it does not say."""
    return max(1, len([path for path in root.glob("node*") if path.name[4:].isdecimal()]))


def binding(
    ranks: int, available: list[int], nodes: int, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Which cores each rank's threads get."""
    data = {"ranks": ranks, "cores": available, "numa_nodes": nodes}
    where = f"{len(available)} cores on {nodes} NUMA node{'s' if nodes > 1 else ''}"
    if len(available) < ranks:
        yield note(
            "cores",
            f"{where} for {ranks} ranks: ranks that wait take the core from those that work",
            "use fewer ranks, or more cores",
            **data,
        )
    else:
        yield ok("cores", where, **data)
    said = environment.get(_BIND)
    if said is None:
        if ranks > 1:
            yield ok("binding", f"{_BIND} is unset: ppcore gives each rank its share of the cores")
        return
    wrong = _wrong_binding(said, ranks, available, nodes)
    if wrong:
        cure = f"unset {_BIND}, or name a group of cores for each rank, '|' between"
        yield problem("binding", f"{_BIND}={said!r} {wrong}", cure)
    else:
        yield ok("binding", f"{_BIND}={said!r}")


def _wrong_binding(said: str, ranks: int, available: list[int], nodes: int) -> str:
    if said == "nobind":
        return ""
    if said == "auto":
        return "refuses two ranks on one NUMA node" if ranks > nodes else ""
    groups = said.split("|")
    if len(groups) < ranks:
        return f"names {len(groups)} group{'s' if len(groups) > 1 else ''} for {ranks} ranks"
    try:
        named = {core for group in groups for core in _cores_of(group)}
    except ValueError:
        return "is no list of cores such as '0-3|4-7'"
    if missing := sorted(named - set(available)):
        return f"names cores that this process may not use: {missing}"
    return ""


def _cores_of(group: str) -> list[int]:
    found = []
    for item in group.split(","):
        first, _, last = item.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def memory_bytes(
    meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")
) -> tuple[int, int] | None:
    """(total, available), within the limit of a container; None where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return total, free
    return min(total, limit), min(free, limit - used)


def memory(ranks: int, found: tuple[int, int] | None) -> Finding:
    if found is None:
        return note("memory", "the system does not say how much there is")
    total, free = found
    said = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    data = {"total_bytes": total, "available_bytes": free}
    needed = ranks * (RANK_BYTES + GIB)
    if free < needed:
        return note(
            "memory",
            f"{said}; {ranks} ranks take {needed / GIB:.0f} GiB beside their weights",
            "set VLLM_CPU_KVCACHE_SPACE=1 (GiB of KV cache a rank), or use a smaller model",
            **data,
        )
    return ok("memory", said, **data)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """The room for vLLM's queues between processes."""
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return note(str(folder), "is not there; vLLM's queues between processes need it")
    said = f"{found.free / MIB:.0f} of {found.total / MIB:.0f} MiB free"
    data = {"total_bytes": found.total, "free_bytes": found.free}
    if found.free < SHM_BYTES:
        return note(
            str(folder),
            f"{said}; vLLM's queue between processes may grow to {SHM_BYTES // MIB} MiB, and a rank "
            "that writes beyond the end dies with a bus error",
            "give the container more: --shm-size=1g, or --ipc=host",
            **data,
        )
    return ok(str(folder), said, **data)


def settings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that change what an engine does."""
    if environment.get(_V2_RUNNER, "0") not in ("", "0"):
        yield problem(
            "settings",
            f"{_V2_RUNNER}={environment[_V2_RUNNER]!r} selects a runner that nnsight does not trace",
            f"unset {_V2_RUNNER}",
        )
    if partition := environment.get("VLLM_PP_LAYER_PARTITION"):
        yield note("settings", f"VLLM_PP_LAYER_PARTITION={partition!r} splits every model's layers")
