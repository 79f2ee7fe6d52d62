"""The compiled simulator: the same runs, and never those of other sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ppsim import compiled, fuzz

ROOT = Path(__file__).resolve().parents[2]


def _ppsim(*words: str, cache: Path, wanted: str = "1") -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), compiled.WANTED: wanted
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "ppsim", *words], cwd=ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_compiled_runs_are_the_same_to_the_last_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = compiled.build(optimize=0)
    assert made == compiled.folder() == compiled.build()
    done = _ppsim("hashes", "--executions", "200", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    here = [
        f"{number} {world.hash & (1 << 64) - 1:016x} {world.events}"
        for number, world in fuzz.executions(0, 200)
    ]
    assert done.stdout.splitlines() == here
    where = "from ppsim import compiled; compiled.use(); import ppcore.core; print(ppcore.core.__file__)"
    found = subprocess.run([sys.executable, "-c", where], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.startswith(str(made)), found.stderr
    # What needs the sources says so.
    for words in (["explore"], ["mutants"], ["fuzz", "--marks"], ["run", "--mode", "real"]):
        refused = _ppsim(*words, cache=tmp_path)
        assert refused.returncode == 1 and "needs the sources" in refused.stderr, refused


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_what_is_compiled_for_speed_is_compiled_with_what_a_run_taught(tmp_path: Path) -> None:
    package = tmp_path / "ppsim"
    package.mkdir()
    for name in ("compiled.py", "extensions.py"):
        shutil.copy(ROOT / "ppsim" / name, package)
    (package / "__init__.py").touch()
    (package / "small.py").write_text("def twice(number: int) -> int:\n    return 2 * number\n")
    (package / "other.py").write_text("from ppsim.small import twice\n\nFOUR = twice(2)\n")
    (package / "fuzz.py").write_text(
        "from ppsim.small import twice\nfrom ppsim.other import FOUR\n\n\ndef executions(first, count):\n"
        "    return map(twice, range(first, first + count))\n"
    )

    def python(*words: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "MYPYPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    said = python("-m", "ppsim.extensions", "3", "ppsim/other.py", "ppsim/small.py")
    learned = list(tmp_path.rglob("*__native*.gcda"))
    assert learned, "the first build counted nothing"
    assert "-fprofile-use" in said and "missing-profile" not in said
    use = "from pathlib import Path; from ppsim import compiled; compiled.use(Path('made').absolute())"
    shown = "from ppsim import small; print(small.__file__, small.twice(4))"
    file, answer = python("-c", f"{use}; {shown}").split()
    assert file.startswith(str(tmp_path / "made")) and answer == "8"


def test_other_sources_need_another_build(tmp_path: Path) -> None:
    for package in ("ppcore", "ppsim"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "vllm")
        )
    where = "from ppsim import compiled; print(compiled.folder())"

    def folder() -> str:
        command = [sys.executable, "-c", where]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    before = folder()
    assert before == f"{compiled.folder()}\n"
    with (tmp_path / "ppcore" / "seat.py").open("a") as file:
        file.write("\n# changed\n")
    assert folder() not in ("", before)


def test_without_a_build_the_command_says_so(tmp_path: Path) -> None:
    done = _ppsim("hashes", "--executions", "1", cache=tmp_path)
    assert done.returncode == 2 and "python -m ppsim compile" in done.stderr
    assert _ppsim("hashes", "--executions", "1", cache=tmp_path, wanted="0").returncode == 0


def test_what_is_imported_already_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.folder().mkdir(parents=True)
    with pytest.raises(compiled.Unbuilt, match="imported before: ppcore.core"):
        compiled.use()
    assert not compiled.active()
