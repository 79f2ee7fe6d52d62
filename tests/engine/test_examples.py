"""The README's first example, as it stands there, on a small checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    from ppcore.vllm.checkpoints import random_llama

    (example,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert '"path-or-repo"' in example and example.count("__main__") == 1
    program = example.replace('"path-or-repo"', repr(str(random_llama(layers=8))))
    # Below the last line, in the block that the guard opens.
    program += "    print('TOKENS', [int(token) for token in kept])\n"
    script = tmp_path / "example.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert len(line.removeprefix("TOKENS [").split(",")) == 8, line
