"""The simulator's inner modules, the core among them, as machine code, for runs that take long.

`build` compiles them with mypyc, as they stand, into a folder of the user's cache, and `use` lets the
modules of that folder be imported in place of their sources. The folder is named after what it was made
of and for, so one that does not fit the sources is never used: after a change there is none until the
next build. The ``ppsim`` command does so where ``PPSIM_COMPILED`` is 1 (see `ppsim.__main__`), and so
do the processes that it starts; nothing else does.

What looks into frames, or puts other code in a function's place, needs the sources: exploring, planted
bugs, marks, the second mode. `needs_sources` refuses then.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

#: What is compiled: what every event of a run passes through.
MODULES = (
    "ppcore.core", "ppcore.effects", "ppcore.errors", "ppcore.messages", "ppcore.saves",
    "ppcore.schedule", "ppcore.seat", "ppcore.series",
    "ppsim.blocks", "ppsim.cases", "ppsim.engine", "ppsim.failures", "ppsim.faults",
    "ppsim.generate", "ppsim.link", "ppsim.oracle", "ppsim.programs", "ppsim.properties",
    "ppsim.rank", "ppsim.rows", "ppsim.seated", "ppsim.terms", "ppsim.values", "ppsim.world",
    "ppsim.commands.against",
    "ppsim.strategies.delay", "ppsim.strategies.pct", "ppsim.strategies.pos",
    "ppsim.strategies.random_walk", "ppsim.strategies.switches",
)  # fmt: skip

#: The variable that says whether compiled modules are wanted: 1 or 0.
WANTED = "PPSIM_COMPILED"
#: Below the folder that is compiled in, where the compiled modules are put.
MADE = "made"
#: How many builds are kept, the one that was made last included.
KEPT = 3

_ROOT = Path(__file__).resolve().parents[1]
#: What the names of folders begin with in which some process builds.
_UNDER_WAY = "making-"
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


class Unbuilt(Exception):
    """There are no compiled modules, and why."""


def _sources() -> list[str]:
    """The modules' files, below the root."""
    return [module.replace(".", "/") + ".py" for module in MODULES]


def folder() -> Path:
    """Where the build of the sources as they stand belongs, for this interpreter."""
    digest = hashlib.sha256(f"{sys.version} {platform.machine()}".encode())
    for path in ("ppsim/extensions.py", *_sources()):
        digest.update((_ROOT / path).read_bytes())
    home = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(home) if home else Path.home() / ".cache") / "ppsim"
    return cache / digest.hexdigest()[:16]


def build(optimize: int = 3) -> Path:
    """Compile the modules, unless that is done; the folder that they are in.

    Args:
        optimize: how far the C compiler goes, 0 to 3; less takes less time, and runs slower.

    Raises:
        Unbuilt: mypyc or a C compiler is missing, or does not take the sources.
    """
    into = folder()
    if into.is_dir():
        return into
    for package in ("mypyc", "setuptools"):
        if importlib.util.find_spec(package) is None:
            raise Unbuilt(f"compiling needs {package}: pip install 'mypy[mypyc]' setuptools")
    cache = into.parent
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=_UNDER_WAY) as place:
        for package in ("ppcore", "ppsim"):
            shutil.copytree(_ROOT / package, Path(place, package), ignore=_beside)
        path = os.pathsep.join([place, *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-m", "ppsim.extensions", str(optimize), *_sources()],
            cwd=place,
            env={**os.environ, "PYTHONPATH": path, "MYPYPATH": place},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise Unbuilt(f"the modules do not compile:\n{done.stdout[-4000:]}")
        if not into.is_dir():  # another process may have been faster
            Path(place, MADE).rename(into)
    builds = [path for path in cache.iterdir() if not path.name.startswith(_UNDER_WAY)]
    for old in sorted(builds, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)
    return into


def _beside(where: str, names: list[str]) -> set[str]:
    """What no compiled module imports."""
    return {"__pycache__", "real", "runtime", "vllm"}.intersection(names)


class _Finder:
    """Finds the compiled modules, and what mypyc has put beside them."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        file = self.made / f"{name.replace('.', '/')}{_SUFFIX}"
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None


def use(made: Path | None = None) -> None:
    """Import the compiled modules from here on, in place of their sources.

    Args:
        made: the folder that they are in; without one that of the sources as they stand.

    Raises:
        Unbuilt: nothing was built there, or the modules are imported already.
    """
    made = made or folder()
    if not made.is_dir():
        raise Unbuilt("nothing is compiled of the sources as they stand: python -m ppsim compile")
    early = [module for module in MODULES if module in sys.modules]
    if early:
        raise Unbuilt(f"imported before: {', '.join(early)}")
    sys.meta_path.insert(0, _Finder(made))


def active() -> bool:
    """Whether this process runs compiled modules."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def needs_sources(what: str) -> None:
    """End the command where compiled modules are in use.

    Raises:
        SystemExit: they are.
    """
    if active():
        raise SystemExit(f"{what} needs the sources: run it without {WANTED}")
