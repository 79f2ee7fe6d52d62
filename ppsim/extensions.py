"""``python -m ppsim.extensions LEVEL FILE...``: compile modules, below the folder that it runs in.

Run by `ppsim.compiled`, in a copy of the sources; the compiled modules are put into ``made``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mypyc.build import mypycify
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

from .compiled import MADE

#: How many generated executions the C compiler learns from which ways are taken.
LEARNED = 600

#: No function is replaced by another library's.
_ALWAYS = ["-fno-semantic-interposition", "-fno-plt"]
_COUNT = ["-fprofile-generate"]
_COUNTED = ["-flto=auto", "-fprofile-use", "-fprofile-partial-training", "-Wno-error"]
_LEARN = f"""
from pathlib import Path
from ppsim import compiled
compiled.use(Path(compiled.MADE).absolute())
from ppsim import fuzz
for _ in fuzz.executions(0, {LEARNED}):
    pass
"""


class _Parallel(build_ext):  # type: ignore[misc]
    """Compiles as many files at a time as there are cores."""

    def build_extensions(self) -> None:
        one = self.compiler.compile

        def compile(sources: list[str], *args: Any, **named: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: one([source], *args, **named), sources)
                return [file for files in made for file in files]

        self.compiler.compile = compile
        super().build_extensions()


def _is_gcc() -> bool:
    """Whether the C compiler is the one whose words for profiles are spoken here."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    words = [*compiler.split(), "-dM", "-E", "-x", "c", os.devnull]
    try:
        said = subprocess.run(words, capture_output=True, text=True).stdout
    except OSError:
        return False
    return "__GNUC__" in said and "__clang__" not in said


def main(level: str, *sources: str) -> None:
    """Compile the sources; at level 3 twice, the second time with what was learned from the first."""
    extensions: list[Extension] = mypycify(
        list(sources), opt_level=level, debug_level="0", multi_file=True
    )
    own = [(list(each.extra_compile_args), list(each.extra_link_args)) for each in extensions]

    def make(flags: list[str]) -> None:
        for extension, (compiling, linking) in zip(extensions, own, strict=True):
            extension.extra_compile_args = [*compiling, *flags]
            extension.extra_link_args = [*linking, *flags, f"-O{level}"]
        script = ["build_ext", "--force", "--build-lib", MADE]
        setup(
            name="compiled", script_args=script, ext_modules=extensions,
            cmdclass={"build_ext": _Parallel},
        )  # fmt: skip

    if level != "3" or not _is_gcc():
        make([])
        return
    make([*_ALWAYS, *_COUNT])
    subprocess.run([sys.executable, "-c", _LEARN], check=True)
    make([*_ALWAYS, *_COUNTED])


if __name__ == "__main__":
    main(*sys.argv[1:])
