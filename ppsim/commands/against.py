"""The same protocol under other deterministic simulators, for ``rate --against``.

detangle and simloop are asyncio event loops that choose which ready callback runs. A world is put on
one of them as it is: each thread of it becomes an asyncio task, which runs its generator to the next
yield and lets the loop choose again, or waits for a future until the thread's condition holds. An
event is the same as in `ppsim.world`: one thread running to its next yield; the checks are the same
too. Messages pass through the world's own queues, or (``detangle-network``) as lines through the
streams of the loop's simulated network, which is how such a simulator is meant to be used; of the two
only that one delays messages against each other. Neither is a dependency; one that cannot be imported
is named and skipped.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from ppcore.messages import Message, parse, spell

from ..cases import Case
from ..failures import Failure
from ..link import Wait
from ..world import Task, World

#: Where a simulated host listens.
PORT = 7000
#: Runs in a row, so that the garbage that each finds is mostly its own.
TURN = 20


class Hosted(World):
    """A world whose threads another loop schedules."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._parked: dict[Task, asyncio.Future[None]] = {}

    def advance(self, task: Task) -> Wait:
        """One event, counted and hashed; what the thread waits for now."""
        self.events += 1
        self._mark = 0
        wait: Wait = None
        try:
            wait = next(task.generator)
        except StopIteration:
            task.done = True
        self.hash = hash((self.hash, task.number, self._mark))
        return wait

    async def drive(self, task: Task) -> None:
        """One thread, as an asyncio task."""
        loop = asyncio.get_running_loop()
        while True:
            wait = self.advance(task)
            if task.done:
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
        listeners = set(self.listeners.values())
        await asyncio.gather(*(run for task, run in driven.items() if task not in listeners))
        while any(self.channels.values()) or len(self._parked) < len(listeners):
            await asyncio.sleep(0)
        ending = [driven[task] for task in listeners]
        for run in ending:
            run.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self.properties.at_rest()


class Networked(Hosted):
    """One whose messages are lines in the streams of the loop's own network, a host for each rank."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._writers: dict[tuple[int, int, int], asyncio.StreamWriter] = {}
        self._under_way = 0
        self._hearing = 0

    def send(self, stage: int, column: int, peer: int, message: Message, token: int | None) -> None:
        self._sent(stage, column, peer, message)
        self._under_way += 1
        self._writers[stage, peer, column].write(f"{json.dumps(token)} {spell(message)}\n".encode())

    async def _hear(self, name: tuple[int, int, int], reader: asyncio.StreamReader) -> None:
        """One listener."""
        task = self.listeners[name]
        self.advance(task)
        while line := await reader.readline():
            token, _, text = line.decode().rstrip("\n").partition(" ")
            self.channels[name].append((parse(text), json.loads(token)))
            while (wait := self.advance(task)) is None:
                await asyncio.sleep(0)
            assert not wait()
            self._under_way -= 1

    async def _serve(self, stage: int, column: int) -> asyncio.AbstractServer:
        async def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = int(await reader.readline())
            self._hearing += 1
            await self._hear((peer, stage, column), reader)
            self._hearing -= 1

        return await asyncio.start_server(met, port=PORT)

    async def _connect(self, stage: int, column: int) -> None:
        for peer in range(self.case.stages):
            if peer != stage:
                _, writer = await asyncio.open_connection(f"rank{peer}.{column}", PORT)
                writer.write(f"{stage}\n".encode())
                self._writers[stage, peer, column] = writer

    async def main(self) -> None:
        spawn = importlib.import_module("detangle").spawn
        servers = []
        for stage, column in self.ranks:
            servers.append(await spawn(self._serve(stage, column), host=f"rank{stage}.{column}"))
        for stage, column in self.ranks:
            await spawn(self._connect(stage, column), host=f"rank{stage}.{column}")
        listeners = set(self.listeners.values())
        await asyncio.gather(
            *(
                spawn(
                    self.drive(task), host=f"rank{task.name[1:]}" if task.name[0] == "f" else None
                )
                for task in self.tasks
                if task not in listeners
            )
        )
        while self._under_way:
            await asyncio.sleep(0.01)  # of the loop's own time
        for writer in self._writers.values():
            writer.close()
        while self._hearing:
            await asyncio.sleep(0.01)
        for server in servers:
            server.close()
        self.properties.at_rest()


def _detangle(module: Any, seed: int, world: Hosted) -> None:
    module.run(world.main, seed=seed)


def _simloop(module: Any, seed: int, world: Hosted) -> None:
    loop = module.SimLoop(seed)
    try:
        loop.run_until_complete(world.main())
    finally:
        loop.close()


#: Name -> the module, the kind of world, what runs it.
HOSTS: dict[str, tuple[str, type[Hosted], Callable[[Any, int, Hosted], None]]] = {
    "detangle": ("detangle", Hosted, _detangle),
    "detangle-network": ("detangle", Networked, _detangle),
    "simloop": ("simloop", Hosted, _simloop),
}


def hosted(case: Case, name: str) -> Callable[[int], int] | str:
    """What runs the case once under a simulator and counts events, or why that cannot be done."""
    package, kind, start = HOSTS[name]
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        return f"{name} cannot be imported: {error}"

    def once(seed: int) -> int:
        world = kind(case)
        start(module, seed, world)
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
    for first in itertools.count(step=TURN):
        for name, run in runs.items():
            began = time.process_time()
            for seed in range(first, first + TURN):
                events[name] += run(seed)
            took[name] += time.process_time() - began
            executions[name] += TURN
        if min(took.values()) >= seconds:
            break
    return {name: (events[name] / took[name], executions[name] / took[name]) for name in runs}
