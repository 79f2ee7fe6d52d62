"""Threads of which exactly one runs: who holds the baton moves.

A thread hands the baton on where a real one lets a lock go, waits, or has sent or received something,
to the task that a strategy chooses. So what threads do is a function of the choices alone: no lock is
ever contended, and no clock runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ppsim.failures import Crash, Failure, Liveness
from ppsim.world import Strategy

#: Events after which a run counts as one that does not end.
LIMIT = 100_000

Wait = Callable[[], bool] | None


class Stopped(BaseException):
    """The run is over: unwinds the threads that are left."""


class Task:
    """A thread.

    Attributes:
        name: ``f1.0`` the forward of stage 1; ``l1.0<0`` its listener to stage 0; ``engine``.
        wait: what it waits for; None while it can move.
    """

    __slots__ = ("done", "go", "name", "number", "run", "steps", "thread", "wait")

    def __init__(self, number: int, name: str, run: Callable[[], None]) -> None:
        self.number, self.name, self.run = number, name, run
        self.wait: Wait = None
        self.done = False
        self.steps = 0
        self.go = threading.Lock()
        self.go.acquire()
        self.thread: threading.Thread | None = None


class Baton:
    """Threads of which one runs.

    Attributes:
        tasks: all of them.
        runnable: those that can move, in the order of their numbers.
        hash: of everything that happened so far.
        schedule: the names of the tasks that moved, where ``record`` is set.
    """

    def __init__(self, *, record: bool = False, limit: int = LIMIT) -> None:
        self.tasks: list[Task] = []
        self.runnable: list[Task] = []
        self.record, self.limit = record, limit
        self.schedule: list[str] = []
        self.events = 0
        self.hash = 0
        self.failure: Failure | None = None
        self._mark = 0
        self._current: Task | None = None
        self._over = False
        self._outside = threading.current_thread()
        self._ended = threading.Lock()
        self._ended.acquire()
        self._strategy: Strategy

    def task(self, name: str, run: Callable[[], None]) -> Task:
        """Add a thread."""
        task = Task(len(self.tasks), name, run)
        task.thread = threading.Thread(target=self._main, args=(task,), name=name, daemon=True)
        self.tasks.append(task)
        return task

    def mark(self, value: int) -> None:
        """Something observable happened in this event: it goes into the hash."""
        self._mark = hash((self._mark, value))

    def pause(self, wait: Wait = None) -> None:
        """Others may move now, and do until ``wait`` holds."""
        if threading.current_thread() is self._outside:
            return  # before the run, or after it
        task = self._current
        if self._over or task is None:
            raise Stopped
        task.wait = wait
        following = self._next()
        if following is task:
            return
        (following.go if following is not None else self._ended).release()
        task.go.acquire()
        if self._over:
            raise Stopped

    def fail(self, failure: Failure) -> None:
        """The run ends with this, unless it has failed already."""
        self.failure = self.failure or failure
        self._over = True

    def _next(self) -> Task | None:
        """The task that moves now; None when the run is over."""
        if self._over:
            return None
        runnable = self.runnable = [
            task for task in self.tasks if not task.done and (task.wait is None or task.wait())
        ]
        if self._current is not None:
            self.hash = hash((self.hash, self._current.number, self._mark, len(runnable)))
        self._mark = 0
        if not runnable or self.events >= self.limit:
            if runnable:
                self.fail(Liveness("ends", f"still running after {self.events} events"))
            self._over = True
            return None
        try:
            task = runnable[self._strategy.choose(self)]  # type: ignore[arg-type]
        except Exception as error:
            self.fail(Crash("strategy", f"{type(error).__name__}: {error}", error))
            return None
        self._current = task
        task.wait = None
        task.steps += 1
        self.events += 1
        if self.record:
            self.schedule.append(task.name)
        return task

    def _main(self, task: Task) -> None:
        task.go.acquire()
        try:
            if not self._over:
                task.run()
        except Stopped:
            pass
        except Failure as failure:
            self.fail(failure)
        except BaseException as error:  # the code under test failed by itself
            self.fail(Crash("crash", f"{task.name}: {type(error).__name__}: {error}", error))
        task.done = True
        if self._current is task:
            following = self._next()
            (following.go if following is not None else self._ended).release()

    def run_tasks(self, strategy: Strategy) -> None:
        """Run until no task can move, then stop those that still wait."""
        self._strategy = strategy
        for task in self.tasks:
            assert task.thread is not None
            task.thread.start()
        first = self._next()
        assert first is not None
        first.go.release()
        self._ended.acquire()
        self._over = True
        self.left = [task for task in self.tasks if not task.done]
        self.rest()
        for task in self.left:
            self._current = None
            task.go.release()
            assert task.thread is not None
            task.thread.join()

    def rest(self) -> None:
        """Nothing moves any more, and nothing has been stopped yet."""


class Lock:
    """A rank's lock and condition (`threading.Condition`), of which the baton knows."""

    def __init__(self, world: Baton) -> None:
        self._world = world
        self._depth = 0
        self._changes = 0

    def __enter__(self) -> Lock:
        self._depth += 1
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._depth -= 1
        if not self._depth and kind is None:
            self._world.pause()

    def wait(self, timeout: float | None = None) -> bool:
        """Until something changes; there is no clock to time out by."""
        assert self._depth == 1
        before = self._changes
        self._depth = 0
        self._world.pause(lambda: self._changes != before)
        self._depth = 1
        return True

    def notify_all(self) -> None:
        """Something changed."""
        self._changes += 1
