"""Stands in for nnsight's tests/vllm/conftest.py; `run.py` puts it there.

The same fixtures, with three differences: no GPU is asked for; engines are kept across the tests of
a module, and replaced once a test has killed or hung one, so that such a test does not decide the
outcome of those behind it; and every outcome is written down as it happens.
"""

import contextlib
import json
import os
import sys
import threading

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

import psutil
import pytest
import torch
import upstream_hook

HERE = os.path.dirname(os.path.abspath(__file__))
RANKS = upstream_hook.SETTINGS["pp"]

# --- what tests ask about GPUs, answered for callers in this folder only ------------------------

_device_count, _mem_get_info = torch.cuda.device_count, torch.cuda.mem_get_info


def _a_test_asks():
    return os.path.dirname(os.path.abspath(sys._getframe(2).f_code.co_filename)) == HERE


def device_count():
    return RANKS if _a_test_asks() else _device_count()


def mem_get_info(device=None):
    return (0, 0) if _a_test_asks() else _mem_get_info(device)


torch.cuda.device_count, torch.cuda.mem_get_info = device_count, mem_get_info

# --- engines ------------------------------------------------------------------------------------

_engines = {}  # name -> (model, the process ids that came with it)
_broken = []  # tests that left an engine dead or stuck, since engines were last discarded


def _children():
    """Descendants, less multiprocessing's resource tracker, which all engines share."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not any("resource_tracker" in word for word in process.cmdline()):
                found.add(process.pid)
    return found


def _shut_down(entrypoint):
    with contextlib.suppress(Exception):
        entrypoint.llm_engine.engine_core.shutdown()


def _discard_engines():
    """Shut every engine down; those of its processes that outstay 20 seconds are killed."""
    for model, pids in _engines.values():
        entrypoint, model.vllm_entrypoint = model.vllm_entrypoint, None
        stop = threading.Thread(target=_shut_down, args=(entrypoint,), daemon=True)
        stop.start()
        stop.join(20)
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(processes, timeout=2)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=10)
    _engines.clear()
    _broken.clear()


def _engine(name, repo, plain=False, **kwargs):
    if _broken:
        _discard_engines()
    if name not in _engines:
        from nnsight.modeling.vllm import VLLM

        before = _children()
        with upstream_hook.plain() if plain else contextlib.nullcontext():
            model = VLLM(repo, dispatch=True, tensor_parallel_size=1, **kwargs)
        _engines[name] = (model, _children() - before)
    return _engines[name][0]


@pytest.fixture(scope="module", autouse=True)
def _engines_of_this_module():
    yield
    _discard_engines()


@pytest.fixture
def ET_prompt():
    return "The Eiffel Tower is located in the city of"


@pytest.fixture
def MSG_prompt():
    return "Madison Square Garden is located in the city of"


@pytest.fixture
def vllm_gpt2():
    return _engine("gpt2", "gpt2", gpu_memory_utilization=0.1)


@pytest.fixture
def vllm_gpt2_uncached():
    return _engine("uncached", "gpt2", gpu_memory_utilization=0.1, enable_prefix_caching=False)


@pytest.fixture
def vllm_qwen_ref():
    return _engine("qwen", "Qwen/Qwen2.5-0.5B", plain=True, gpu_memory_utilization=0.2)


@pytest.fixture
def vllm_qwen_tp():
    pytest.skip("tensor parallelism is not part of this run")


# --- outcomes -----------------------------------------------------------------------------------


def _write(**entry):
    with open(upstream_hook.SETTINGS["report"], "a") as out:
        out.write(json.dumps(entry) + "\n")


def pytest_collection_finish(session):
    _write(collected=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid, location):
    _write(started=nodeid)


def pytest_runtest_logreport(report):
    error = ""
    if report.failed:
        text = str(report.longrepr)
        crash = getattr(report.longrepr, "reprcrash", None)
        error = crash.message if crash else text
        if "Timeout (>" in text or "EngineDeadError" in text or "EngineCore" in error:
            _broken.append(report.nodeid)
    elif report.skipped and isinstance(report.longrepr, tuple):
        error = report.longrepr[2]
    _write(
        nodeid=report.nodeid, when=report.when, outcome=report.outcome,
        seconds=round(report.duration, 2), error=error[:1500],
    )  # fmt: skip
