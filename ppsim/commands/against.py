"""The same protocol under other deterministic simulators, for ``rate --against``.

detangle and simloop are asyncio event loops that choose which ready callback runs. A world is put on
one of them as it is: each thread of it becomes an asyncio task, which runs its generator to the next
yield and lets the loop choose again, or waits for a future until the thread's condition holds. An
event is the same as in `ppsim.world`: one thread running to its next yield; the checks are the same
too. Neither is a dependency; one that cannot be imported is named and skipped.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import time
from collections.abc import Callable
from typing import Any

from ..cases import Case
from ..failures import Failure
from ..world import Task, World


class Hosted(World):
    """A world whose threads another loop schedules."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._parked: dict[Task, asyncio.Future[None]] = {}

    async def drive(self, task: Task) -> None:
        """One thread, as an asyncio task."""
        loop = asyncio.get_running_loop()
        while True:
            self.events += 1
            try:
                wait = next(task.generator)
            except StopIteration:
                task.done = True
                return
            if wait is None or wait():
                await asyncio.sleep(0)
            else:
                task.wait = wait
                parked = self._parked[task] = loop.create_future()
                await parked

    def _wake(self, task: Task) -> None:
        if task.wait is not None and task.wait():
            task.wait = None
            self._parked.pop(task).set_result(None)

    async def main(self) -> None:
        """The whole run, with the checks at its end."""
        driven = {task: asyncio.ensure_future(self.drive(task)) for task in self.tasks}
        listeners = set(self._listeners.values())
        await asyncio.gather(*(run for task, run in driven.items() if task not in listeners))
        while any(self.channels.values()) or len(self._parked) < len(listeners):
            await asyncio.sleep(0)
        for task in listeners:
            driven[task].cancel()
        self.properties.at_rest()


def _detangle(module: Any, seed: int, world: Hosted) -> None:
    module.run(world.main, seed=seed)


def _simloop(module: Any, seed: int, world: Hosted) -> None:
    loop = module.SimLoop(seed)
    try:
        loop.run_until_complete(world.main())
    finally:
        loop.close()


HOSTS: dict[str, Callable[[Any, int, Hosted], None]] = {"detangle": _detangle, "simloop": _simloop}


def hosted(case: Case, name: str) -> Callable[[int], int] | str:
    """What runs the case once under a simulator and counts events, or why that cannot be done."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return f"{name} cannot be imported: {error}"

    def once(seed: int) -> int:
        world = Hosted(case)
        HOSTS[name](module, seed, world)
        return world.events

    try:
        once(0)
    except Failure:
        raise
    except Exception as error:
        return f"{name} cannot host it: {type(error).__name__}: {error}"
    return once


def measure(
    runs: dict[str, Callable[[int], int]], seconds: float
) -> dict[str, tuple[float, float]]:
    """Events and executions per second of CPU time, taking turns so that all meet the same machine."""
    events = dict.fromkeys(runs, 0)
    executions = dict.fromkeys(runs, 0)
    took = dict.fromkeys(runs, 0.0)
    for seed in itertools.count():
        for name, run in runs.items():
            began = time.process_time()
            events[name] += run(seed)
            took[name] += time.process_time() - began
            executions[name] += 1
        if min(took.values()) >= seconds:
            break
    return {name: (events[name] / took[name], executions[name] / took[name]) for name in runs}
