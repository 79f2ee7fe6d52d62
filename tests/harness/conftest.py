"""Processes for the tests of a module, and the reference that they are compared with."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("nnsight") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/harness/" in item.path.as_posix():
            item.add_marker(pytest.mark.harness)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, so that its processes are started once."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(scope="session")
def reference() -> Any:
    """A client of plain nnsight on one rank."""
    from tests.harness.cluster import Client, Reference

    return Client(Reference())


@pytest.fixture(scope="session")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Any]]:
    """The processes of a column of so many stages: started once, and anew after a failure."""
    from tests.harness.cluster import Cluster

    running: dict[int, Cluster] = {}

    def get(stages: int) -> Cluster:
        found = running.get(stages)
        if found is not None and not found.answers():
            running.pop(stages).stop()
            found = None
        if found is None:
            found = Cluster(stages, tmp_path_factory.mktemp("column"))
            try:
                found.wait_ready()
            except BaseException:
                found.stop()
                raise
            running[stages] = found
        return found

    yield get
    for cluster in running.values():
        cluster.stop()


@pytest.fixture
def cluster(request: pytest.FixtureRequest, columns: Callable[[int], Any]) -> Any:
    """The processes of a column; a module says how many stages with ``STAGES``."""
    return columns(getattr(request.module, "STAGES", 2))


@pytest.fixture
def staged(cluster: Any) -> Any:
    """A client of the column."""
    from tests.harness.cluster import Client

    return Client(cluster)


@pytest.fixture
def both(reference: Any, staged: Any) -> Callable[..., Any]:
    """Run a function that traces on both clients, compare all that came home, return what it did."""
    from tests.harness.compare import same_runs

    return lambda run, *args: same_runs(run, reference, staged, *args)
