"""`ppcore serve`, over an engine of two stages of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from ppcore.errors import SetupError
from ppcore.vllm.child import _session_members, _wait_until_gone

KEY = "a key of the test"
PROMPT = [5, 6, 7]


class Server(NamedTuple):
    url: str
    checkpoint: str
    process: subprocess.Popen[bytes]

    def complete(self, **settings: Any) -> list[int]:
        """The tokens that OpenAI's route answers with."""
        wanted = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(
            f"{self.url}/v1/completions",
            headers={"authorization": f"Bearer {KEY}"},
            json={"model": self.checkpoint, **wanted, **settings},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def server(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    words = [sys.executable, "-m", "ppcore", "serve", checkpoint, "--pipeline-parallel-size", "2"]
    words += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    words += ["--port", str(port), "--api-key", KEY]
    with log.open("w") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_healthy(url, process, log)
        yield Server(url, checkpoint, process)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        _wait_until_gone(process.pid, 10)
        assert list(_session_members(process.pid)) == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def wait_healthy(url: str, process: subprocess.Popen, log: Path, timeout_s: float = 300) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    raise AssertionError(f"no answer within {timeout_s} s\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def client(checkpoint: str) -> Any:
    """A model without weights."""
    from ppcore.vllm import VLLM

    return VLLM(checkpoint)


def test_a_trace_is_served(server: Server, client: Any) -> None:
    with client.trace(
        PROMPT, serve=server.url, api_key=KEY, max_tokens=4, temperature=0.0
    ) as tracer:
        early = client.model.layers[0].output[0].save()
        late = client.model.layers[3].output[0].save()
        result = tracer.result.save()
    assert early.shape == late.shape == (len(PROMPT), 64)
    assert list(result.outputs[0].token_ids) == server.complete()


def test_an_edit_runs_for_requests_of_both_kinds(server: Server, client: Any) -> None:
    before = server.complete()
    with client.edit(serve=server.url, api_key=KEY) as (tracer, edit):
        early = client.model.layers[0].output[0].clone().save()  # noqa: F841
        client.model.layers[3].output[0][:] = 1
    edited = server.complete()
    with client.trace(
        PROMPT, serve=server.url, api_key=KEY, max_tokens=4, temperature=0.0
    ) as tracer:
        result = tracer.result.save()
    edit.clear()
    assert edited != before
    assert list(result.outputs[0].token_ids) == edited
    assert result.saves["early"].shape == (len(PROMPT), 64)
    assert server.complete() == before


def test_an_error_in_a_block_reaches_the_client(server: Server, client: Any) -> None:
    with (
        pytest.raises(RuntimeError, match="ZeroDivisionError"),
        client.trace(PROMPT, serve=server.url, api_key=KEY, max_tokens=1),
    ):
        client.model.layers[0].output[0] * (1 / 0)
    assert server.complete()


def test_without_the_key_nothing_is_run(server: Server, client: Any) -> None:
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    with (
        pytest.raises(ConnectionError, match="Invalid API key"),
        client.trace(PROMPT, serve=server.url, max_tokens=1),
    ):
        client.model.layers[0].output[0].save()


def test_a_killed_rank_is_named_and_the_server_ends(
    server: Server, client: Any, tmp_path: Path
) -> None:
    killed: list[float] = []

    def kill() -> None:
        flag = tmp_path / "1"
        while not flag.exists():
            time.sleep(0.01)
        killed.append(time.monotonic())
        os.kill(int(flag.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    running = str(tmp_path)
    with (
        pytest.raises(RuntimeError, match="PeerDied: the rank of stage 1, column 0 is gone"),
        client.trace(
            PROMPT, serve=server.url, api_key=KEY, max_tokens=400, ignore_eos=True
        ) as tracer,
    ):
        for step in tracer.iter[:]:
            early = client.model.layers[0].output[0][-1].clone()
            client.model.layers[6].output[0][-1] += early
            if step == 5:
                import os as rank

                from vllm.distributed.parallel_state import get_pp_group

                stage = get_pp_group().rank_in_group
                with open(f"{running}/{stage}.part", "w") as flag:
                    flag.write(str(rank.getpid()))
                rank.rename(f"{running}/{stage}.part", f"{running}/{stage}")
    killer.join()
    assert time.monotonic() - killed[0] < 10
    server.process.wait(60)  # vLLM's server looks every five seconds whether its engine is dead
    _wait_until_gone(server.process.pid, 10)
    assert list(_session_members(server.process.pid)) == []


def test_an_open_address_wants_a_key() -> None:
    from ppcore.vllm.serve import parse

    with pytest.raises(SetupError, match="--api-key"):
        parse(["some/model", "--host", "0.0.0.0"])


def test_engine_settings_are_those_that_were_given() -> None:
    from ppcore.vllm.serve import parse

    words = ["--pipeline-parallel-size", "2", "--max-num-seqs", "7", "--timeline", "out.json"]
    args, settings = parse(["some/model", *words])
    assert settings == {"pipeline_parallel_size": 2, "max_num_seqs": 7, "timeline": "out.json"}
    assert args.host == "127.0.0.1"
