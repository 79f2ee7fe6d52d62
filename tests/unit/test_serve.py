"""The server's own parts, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from ppcore.vllm.serve import Collected, KeyCheck, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_addresses(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "", "example.org"])
def test_addresses_that_others_reach(host: str) -> None:
    assert not is_loopback(host)


# --- the key ----------------------------------------------------------------------------------


def status(path: str, headers: dict[str, str]) -> int:
    """The status with which the application behind the check, or the check, answers."""
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "path": path, "method": "GET",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    asyncio.run(KeyCheck(application, ["first", "second"])(scope, receive, send))
    return sent[0]["status"]


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first"},
        {"authorization": "bearer second"},
        {"ndif-api-key": "second"},
    ],
)
def test_either_header_carries_the_key(headers: dict[str, str]) -> None:
    assert status("/v1/completions", headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Basic first"},
        {"authorization": "first"},
        {"ndif-api-key": "firs"},
        {"ndif-api-key": "first", "authorization": "Bearer wrong"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/nnsight/generate", "/invocations", "/metrics"])
def test_without_the_key_no_route_answers(path: str, headers: dict[str, str]) -> None:
    assert status(path, headers) == 401


def test_a_probe_needs_no_key() -> None:
    assert status("/health", {}) == 200


# --- collecting -------------------------------------------------------------------------------


class Engine:
    """Streams two outputs; notes what is asked of every rank."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.closed = 0

    async def collective_rpc(self, method: str, args: tuple = ()) -> list:
        self.calls.append((method, args[0] if args else None, len(args)))
        return []

    async def generate(self, prompt: Any, params: Any, name: str) -> Any:
        try:
            yield SimpleNamespace(finished=False)
            yield SimpleNamespace(finished=True)
        finally:
            self.closed += 1


def collects(*, edited: bool, traced: bool = False, stop_after: int = 2) -> tuple[Engine, list]:
    """What is collected for a request whose client stops reading after so many outputs."""
    engine = Engine()
    params = SimpleNamespace(extra_args={"nnsight_mediator": b""} if traced else None)

    async def run() -> None:
        served = Collected(engine)
        if edited:
            await served.collective_rpc("nnsight_register", args=("id", b"", None))
        stream = served.generate("prompt", params, "request")
        for _ in range(stop_after):
            await anext(stream)
        if stop_after == 2:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    return engine, [call for call in engine.calls if call[0] == "collect_nnsight"]


def test_an_edited_request_is_collected_with_its_output() -> None:
    engine, found = collects(edited=True)
    assert found == [("collect_nnsight", ["request"], 3)]
    assert engine.closed == 1


def test_a_client_that_hangs_up_ends_the_stream_and_what_an_edit_holds() -> None:
    engine, found = collects(edited=True, stop_after=1)
    assert found == [("collect_nnsight", ["request"], 2)]
    assert engine.closed == 1


def test_a_trace_is_collected_by_its_own_client() -> None:
    assert collects(edited=True, traced=True)[1] == []


def test_without_edits_nothing_is_asked_of_the_ranks() -> None:
    assert collects(edited=False)[1] == []
