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


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """The processes of a column; a module says how many stages with ``STAGES``."""
    from tests.harness.cluster import Cluster

    stages = getattr(request.module, "STAGES", 2)
    found = Cluster(stages, tmp_path_factory.mktemp("column"))
    try:
        found.wait_ready()
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def staged(cluster: Any) -> Any:
    """A client of the column."""
    from tests.harness.cluster import Client

    return Client(cluster)


@pytest.fixture
def both(reference: Any, staged: Any) -> Callable[..., Any]:
    """Run a function that traces on both clients, compare all that came home, return what it did."""
    from tests.harness.compare import same_runs

    return lambda run, *args: same_runs(run, reference, staged, *args)
