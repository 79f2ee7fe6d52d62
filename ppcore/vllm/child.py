"""An engine in a process of its own, started and stopped through a handle.

Two engines cannot always share a client process: nnsight brings up a process group there for its meta tree,
vLLM reads its settings from the environment, and a client that is killed leaves workers behind. Here each
engine gets a child process, in a session of its own, whose output goes to a file:

    with EngineProcess("path", pipeline_parallel_size=2) as engine:
        engine.wait_ready()
        answer = engine.call(function, 1, 2)        # function(model, 1, 2), in the child

If the parent is gone the child ends, after half a minute at the latest, whatever it is at.

The two talk over a pair of pipes: a request is a pickled `(function, args, kwargs)`, with the function named
by reference, the reply a pickled `("ok", value)` or `("error", text)`. `stop()` ends the child and checks that
nothing of its session is left.

This module is also what the child runs: `python -m ppcore.vllm.child READ_FD WRITE_FD`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ppcore.vllm.warm import WarmProcess

__all__ = ["EngineError", "EngineProcess"]

#: What the demo and the tests run on unless told otherwise.
MODEL_CLASS = "ppcore.vllm:VLLM"

_CUT_SHORT = re.compile(r"Warning: '([^'\n]+)' was never reached: the loop asked")


class EngineError(RuntimeError):
    """An engine process that did not start, died, answered too late, or whose function raised."""


class EngineProcess:
    """An engine in a child process; created stopped.

    Args:
        checkpoint: what the model class takes as its first argument.
        model_class: `"module:Class"`, imported in the child; `MODEL_CLASS` by default.
        log: file that takes the output of the child and of vLLM's processes; a temporary one by default.
        env: added to the child's environment.
        warm: start it from a server that has imported everything already, see `ppcore.vllm.warm`.
        settings: keyword arguments of the model class.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        model_class: str | None = None,
        log: str | Path | None = None,
        env: dict[str, str] | None = None,
        warm: bool = False,
        **settings: Any,
    ) -> None:
        self.checkpoint = str(checkpoint)
        self.model_class = model_class or MODEL_CLASS
        self.settings = settings
        self.env = dict(env or {})
        self.warm = warm
        self.log = Path(log) if log else Path(tempfile.mkdtemp(prefix="ppcore-")) / "engine.log"
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None
        self._connection: _Pipes | None = None
        self._ready = False
        #: Died, or did not answer in time: what it would say next is not the answer to what it is asked.
        self.broken = False
        self._log_read = 0

    def __enter__(self) -> EngineProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- starting

    def start(self) -> None:
        """Start the child; returns at once, see `wait_ready`."""
        if self._process is not None:
            raise EngineError(f"the engine of {self.checkpoint!r} is already started")
        down_read, down_write = os.pipe()
        up_read, up_write = os.pipe()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_read = self.log.stat().st_size if self.log.exists() else 0
        environment = {
            **os.environ,
            # Repeated warnings have to be seen each time: they are part of what is compared.
            "PYTHONWARNINGS": "always::UserWarning",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HF_HUB_OFFLINE": os.environ.get(
                "HF_HUB_OFFLINE", "1" if os.path.exists(self.checkpoint) else "0"
            ),
            "VLLM_NO_USAGE_STATS": "1",
            **self.env,
        }
        if self.warm:
            self._process = WarmProcess(down_read, up_write, self.log, environment)
        else:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "ppcore.vllm.child", str(down_read), str(up_write)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=(down_read, up_write),
                    start_new_session=True,
                )
        os.close(down_read)
        os.close(up_write)
        self._connection = _Pipes(up_read, down_write)
        self._connection.send((self.model_class, self.checkpoint, self.settings))

    def wait_ready(
        self, timeout_s: float = 600.0, tick: Callable[[float], None] | None = None
    ) -> None:
        """Wait until the engine takes requests.

        Args:
            tick: called about ten times a second with the seconds waited.

        Raises:
            EngineError: it did not come up; the message ends with the tail of the log and its path.
        """
        if self._process is None:
            self.start()
        if not self._ready:
            self._receive(timeout_s, "to start", tick)
            self._ready = True

    # -- use

    def call(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> Any:
        """`function(model, *args, **kwargs)` in the child; the function is named by reference.

        Raises:
            EngineError: the function raised (the message is its traceback), or no answer came.
        """
        if self.broken:
            raise EngineError(f"the engine of {self.checkpoint!r} failed earlier; see {self.log}")
        self.wait_ready()
        assert self._connection is not None
        try:
            self._connection.send((function, args, kwargs))
        except BrokenPipeError:
            raise self._failed("closed its pipe") from None
        return self._receive(timeout_s, f"{getattr(function, '__name__', function)}")

    def warnings(self) -> list[str]:
        """The locations at which loops were cut short since the last time this was asked, each once.

        nnsight warns in the process that ran the block, so the log is where a client can see it.
        """
        with self.log.open("rb") as log:
            log.seek(self._log_read)
            new = log.read()
        self._log_read += len(new)
        return sorted(set(_CUT_SHORT.findall(new.decode(errors="replace"))))

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the engine's processes wrote."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    # -- ending

    def stop(self, timeout_s: float = 60.0, grace_s: float = 10.0) -> list[int]:
        """Stop the engine and everything it started.

        Args:
            timeout_s: how long the child has to shut its engine down.
            grace_s: how long its processes have to be gone after that, before they are killed.

        Returns:
            The processes that had to be killed because they outlived the engine: empty if all went well.
        """
        process = self._process
        if process is None:
            return []
        assert self._connection is not None
        with contextlib.suppress(OSError):
            self._connection.send(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        # Of a child that did not get to shut its engine down, nothing more is to be expected.
        session = process.pid
        _wait_until_gone(session, grace_s if process.returncode == 0 else min(grace_s, 2.0))
        left = list(_session_members(session))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        _wait_until_gone(session, 5.0)
        self._connection.close()
        self._process = self._connection = None
        self._ready = self.broken = False
        return left

    def processes(self) -> list[int]:
        """The live processes of the child's session: the child, the engine core and the workers."""
        if self._process is None:
            return []
        return list(_session_members(self._process.pid))

    # -- inside

    def _receive(
        self, timeout_s: float, what: str, tick: Callable[[float], None] | None = None
    ) -> Any:
        assert self._process is not None and self._connection is not None
        begun = time.monotonic()
        while not self._connection.poll(0.1):
            waited = time.monotonic() - begun
            if tick is not None:
                tick(waited)
            if self._process.poll() is not None:
                raise self._failed(f"ended with status {self._process.returncode} ({what})")
            if waited > timeout_s:
                raise self._failed(f"gave no answer in {timeout_s:.0f} s ({what})")
        try:
            kind, value = self._connection.receive()
        except EOFError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            raise self._failed(f"ended with status {self._process.poll()} ({what})") from None
        if kind == "ok":
            return value
        if not self._ready:
            raise self._failed(f"did not start: {value}")
        raise EngineError(value)

    def _failed(self, what: str) -> EngineError:
        self.broken = True
        return EngineError(
            f"the engine of {self.checkpoint!r} {what}\n{self.log_tail()}\nfull output: {self.log}"
        )


class _Pipes:
    """Pickles over two pipe ends."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._in = Connection(read_fd, writable=False)
        self._out = Connection(write_fd, readable=False)

    def send(self, value: Any) -> None:
        # Not `Connection.send`: it hands tensors over as shared memory of a process that may be gone.
        self._out.send_bytes(pickle.dumps(value))

    def receive(self) -> Any:
        return pickle.loads(self._in.recv_bytes())

    def poll(self, timeout_s: float) -> bool:
        return self._in.poll(timeout_s)

    def close(self) -> None:
        self._in.close()
        self._out.close()


def _session_members(session: int) -> Iterator[int]:
    """Processes of a session that are not zombies, by /proc."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        # After the parenthesized command name: state, ppid, pgrp, session.
        state, _, _, sid = stat.rpartition(")")[2].split()[:4]
        if int(sid) == session and state != "Z":
            yield int(entry)


def _wait_until_gone(session: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(_session_members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)


def close_engine(model: Any) -> None:
    """Shut a dispatched model's engine down, and wait for its processes."""
    if hasattr(model, "close"):
        model.close()
        return
    entrypoint = getattr(model, "vllm_entrypoint", None)
    if entrypoint is not None:  # which is the engine itself with mode="async"
        getattr(entrypoint, "llm_engine", entrypoint).engine_core.shutdown()


def _end_after_parent(read_fd: int, grace_s: float) -> None:
    """Kill the session so long after the parent is gone: what it is at now may never end by itself."""
    gone = select.poll()
    gone.register(read_fd, 0)  # nothing but the other end's closing
    gone.poll()
    time.sleep(grace_s)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(read_fd: int, write_fd: int) -> int:
    """The child's loop: build the model, then answer requests until told to stop or the parent is gone."""
    grace_s = float(os.environ.get("PPCORE_ORPHAN_GRACE_S", "30"))
    threading.Thread(target=_end_after_parent, args=(read_fd, grace_s), daemon=True).start()
    pipes = _Pipes(read_fd, write_fd)
    model_class, checkpoint, settings = pipes.receive()
    try:
        module, _, name = model_class.partition(":")
        model = getattr(importlib.import_module(module), name)(
            checkpoint, dispatch=True, **settings
        )
    except BaseException as error:
        traceback.print_exc()
        pipes.send(("error", f"{type(error).__name__}: {error}"))
        return 1
    pipes.send(("ok", None))
    try:
        while True:
            try:
                request = pipes.receive()
            except EOFError:
                break
            if request is None:
                break
            function, args, kwargs = request
            try:
                reply = ("ok", function(model, *args, **kwargs))
            except Exception:
                reply = ("error", traceback.format_exc())
            try:
                pipes.send(reply)
            except BrokenPipeError:
                break
            except Exception:
                pipes.send(("error", f"the result cannot be sent: {traceback.format_exc()}"))
    finally:
        close_engine(model)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
