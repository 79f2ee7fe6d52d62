"""Engines that start warm, and the table of what became of each trace."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ppsim import pages

#: The first error that a process of an engine reports, which those after it follow from.
_ERROR = re.compile(r"\b(?:\w+\.)*\w*(?:Error|Exception): .+")

#: Seconds that an engine may take to start, and a call to be answered. Both are far above what was seen (20 s,
#: 3 s, on a busy machine) and the second far below the deadline of a wait inside the engine.
START_S, CALL_S = 240.0, 60.0


class Engine:
    """An engine and what became of its start: running, or refused with an error."""

    def __init__(
        self,
        checkpoint: str,
        env: dict[str, str] | None = None,
        warm: bool = True,
        **settings: Any,
    ) -> None:
        from ppcore.vllm.child import EngineProcess

        settings = {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 26,
            **settings,
        }
        self.process = EngineProcess(checkpoint, warm=warm, env=env, **settings)
        self.error = ""
        self.process.start()
        self._begun = time.monotonic()

    def wait(self) -> Engine:
        from ppcore.vllm.child import EngineError

        try:
            self.process.wait_ready(timeout_s=START_S)
        except EngineError as error:
            self.error = str(error).splitlines()[0].partition("did not start: ")[2] or str(error)
            if (
                "Engine core initialization failed" in self.error
            ):  # what a worker said is in the log
                found = _ERROR.search(self.process.log.read_text(errors="replace"))
                self.error = found[0] if found else self.error
        return self

    def call(self, function: Any, *args: Any) -> Any:
        from ppcore.vllm.traces.perform import measured

        return self.process.call(measured, function, *args, timeout_s=CALL_S)

    def age_s(self) -> float:
        """Seconds since the engine was asked for."""
        return time.monotonic() - self._begun

    def stop(self) -> list[int]:
        """Stop the engine; the processes that outlived it, which an engine that started leaves none of."""
        # A start that failed can leave ranks that wait for each other: not for long, here.
        return self.process.stop(timeout_s=3.0 if self.error else 60.0)


class Table:
    """Of each title: row -> column -> outcome. It prints as text, and can be read back from it."""

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

    @classmethod
    def read(cls, lines: Iterable[str]) -> Table:
        """What `lines` printed, without its notes. An outcome is one word then, and none is missing."""
        table, title, columns, left = cls(), "", list[str](), 0
        for line in lines:
            if not line.strip():
                title = ""
            elif not title:
                title, gap, rest = re.fullmatch(r"(\S+(?: \S+)*)(  +)(.*)", line).groups()  # type: ignore[union-attr]
                columns, left = rest.split(), len(title + gap)
            elif not line.startswith("  "):
                row = line[:left].strip()
                for column, outcome in zip(columns, line[left:].split(), strict=False):
                    table.enter(title, row, column, outcome)
        return table

    def update(self, other: Table) -> None:
        """Take over the rows of ``other`` that tell of every column: the others are not run to their end."""
        for title, rows in other.cells.items():
            mine = self.cells.setdefault(title, {})
            columns = {column for cells in [*mine.values(), *rows.values()] for column in cells}
            mine |= {row: cells for row, cells in rows.items() if cells.keys() == columns}
            if not mine:
                del self.cells[title]


#: On the page, what stands between these is the tables of the last runs.
BEGIN, END = "<!-- tables: nox -s engine -- --page -->\n\n```text\n", "```\n\n<!-- /tables -->"


def on_page(page: str) -> Table:
    """The tables that stand on the page."""
    return Table.read(page.partition(BEGIN)[2].partition(END)[0].splitlines())


def filled(page: str, table: Table) -> str:
    """The page with the rows of ``table``, and those that it had before of what ``table`` does not tell."""
    whole = on_page(page)
    whole.update(table)
    return pages.replaced(page, BEGIN, END, "\n".join(whole.lines()).rstrip() + "\n")
