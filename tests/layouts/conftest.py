"""Engines of every architecture and layout, each started once; the outcome of every trace in a table.

An engine is forked from one process that has imported everything (`ppcore.vllm.warm`): thirty engines start in
the time in which three would. At the end of the run a table shows architecture (or layout) by trace kind.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None or importlib.util.find_spec("nnsight") is None:
    collect_ignore_glob = ["test_*.py"]

#: Seconds that an engine may take to start, and a call to be answered. Both are far above what was seen (20 s,
#: 3 s, on a busy machine) and the second far below the deadline of a wait inside the engine.
START_S, CALL_S = 240.0, 60.0


class Engine:
    """An engine and what became of its start: running, or refused with an error."""

    def __init__(self, checkpoint: str, env: dict[str, str] | None = None, **settings: Any) -> None:
        from ppcore.vllm.child import EngineProcess

        settings = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 26,
            **settings,
        }
        self.process = EngineProcess(checkpoint, warm=True, env=env, **settings)
        self.error = ""
        self.process.start()

    def wait(self) -> Engine:
        from ppcore.vllm.child import EngineError

        try:
            self.process.wait_ready(timeout_s=START_S)
        except EngineError as error:
            self.error = str(error)
        return self

    def call(self, function: Any, *args: Any) -> Any:
        from ppcore.vllm.traces.perform import measured

        return self.process.call(measured, function, *args, timeout_s=CALL_S)

    def stop(self) -> None:
        left = self.process.stop()
        assert left == [] or self.error or self.process.broken, f"outlived its engine: {left}"


class Table:
    """row -> column -> outcome."""

    def __init__(self) -> None:
        self.cells: dict[str, dict[str, dict[str, str]]] = {}

    def enter(self, title: str, row: str, column: str, outcome: str) -> None:
        self.cells.setdefault(title, {}).setdefault(row, {})[column] = outcome

    def lines(self) -> Iterator[str]:
        for title, rows in self.cells.items():
            columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
            wide = max(len(title), *map(len, rows)) + 2
            yield title.ljust(wide) + " ".join(column.ljust(8) for column in columns)
            notes = []
            for row, cells in rows.items():
                shown = []
                for column in columns:
                    outcome = cells.get(column, "")
                    word, _, note = outcome.partition(": ")
                    shown.append(word.ljust(max(8, len(column))))
                    if note and f"{row}: {note}" not in notes:
                        notes.append(f"{row}: {note}")
                yield row.ljust(wide) + " ".join(shown)
            yield from (f"  {note}" for note in notes)
            yield ""


TABLE = pytest.StashKey[Table]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = Table()


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
