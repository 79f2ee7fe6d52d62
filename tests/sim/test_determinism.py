"""A run is a function of its seed: the same hash again, in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ppsim import fuzz

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(300)
CODE = f"from ppsim import fuzz\nprint(*[fuzz.execution(n).hash for n in range({len(SEEDS)})])"


def test_one_seed_has_one_hash_in_any_process() -> None:
    here = [str(fuzz.execution(number).hash) for number in SEEDS]
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        there = subprocess.run(
            [sys.executable, "-c", CODE],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert there.stdout.split() == here
    assert len(set(here)) > len(SEEDS) // 2
