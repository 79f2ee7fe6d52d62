"""Engines of every architecture and layout, each started once; the outcome of every trace in a table.

An engine is forked from one process that has imported everything (`ppcore.vllm.warm`): thirty engines start in
the time in which three would. At the end of the run a table shows architecture (or layout) by trace kind;
with ``--page`` its rows go into docs/supported.md, in place of those that it had of the same.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.layouts.engines import Table, filled

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nnsight") is None:
    collect_ignore_glob = ["test_*.py"]

TABLE = pytest.StashKey[Table]()


PAGE = Path(__file__).resolve().parents[2] / "docs/supported.md"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--page", action="store_true", help="put the tables of layouts into docs/supported.md"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = Table()


@pytest.fixture(autouse=True)
def on_the_page(request: pytest.FixtureRequest, table: Table) -> Iterator[None]:
    """What a run that is stopped has found is on the page."""
    yield
    _write(request.config, table)


def _write(config: pytest.Config, table: Table) -> None:
    if config.getoption("--page", default=False):
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Table:
    return request.config.stash.setdefault(TABLE, Table())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/layouts/" in item.path.as_posix():
            item.add_marker(pytest.mark.engine)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    table = config.stash.get(TABLE, None)
    if table is not None and table.cells:
        terminalreporter.section("layouts")
        for line in table.lines():
            terminalreporter.write_line(line)
        _write(config, table)
