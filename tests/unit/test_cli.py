"""The command line: quick to answer, and clear about what it does not know."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from ppcore import __version__, cli


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert name in said and command.about in said


def test_the_overview_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from ppcore.cli import main\n"
        "assert main([]) == 0\n"
        "heavy = {'torch', 'vllm', 'nnsight', 'greenlet', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["nonsense"])
    assert ended.value.code == 2
    assert "'nonsense'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ppcore {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_functions(name: str) -> None:
    module = importlib.import_module(cli.COMMANDS[name].module)
    if not hasattr(module, "main"):
        assert callable(module.add_arguments) and callable(module.run)
