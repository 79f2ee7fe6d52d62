"""`ppcore serve`: one engine behind HTTP, for nnsight's clients and OpenAI's.

The routes are nnsight's own (`/v1/nnsight/...`: traces with `serve=URL`, edits with
`model.edit(serve=URL)`) beside those of vLLM's API server, over one engine of any number of stages.
An edit that is installed runs for every request, whichever route it came by.

A trace is code that the server runs. So the server listens on the loopback interface unless told
otherwise, and elsewhere only with a key.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hmac
import ipaddress
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ..errors import SetupError
from ..runtime.transport import CHOICES

#: Engine settings that the model class makes by itself.
_OWN = frozenset({"model", "worker_cls", "enforce_eager"})

#: Arguments of the model class that vLLM does not know.
_OPTIONS: dict[str, dict[str, Any]] = {
    "--pull-timeout-s": {
        "type": float,
        "help": "how long a stage waits for a value of another one before the trace ends with a report",
    },
    "--block-timeout-s": {
        "type": float,
        "help": "how long a block may run without touching the model before its trace ends",
    },
    "--transport": {"choices": CHOICES, "help": "what values cross between stages on"},
    "--timeline": {"metavar": "FILE", "help": "record what every rank does in a Chrome trace"},
}


def main(argv: Sequence[str]) -> int:
    """Run the server until it is interrupted; returns the exit status."""
    try:
        options = parse(argv)
    except SetupError as error:
        print(f"ppcore serve: {error}")
        return 2
    asyncio.run(_serve(*options))
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """vLLM's own options for a server, and the engine settings among them that differ from its defaults.

    Raises:
        SetupError: an address that other machines reach, and no key.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(
        FlexibleArgumentParser(
            prog="ppcore serve",
            description="Serve nnsight traces and edits, and vLLM's OpenAI routes, from one engine.",
            epilog="Every option of `vllm serve` is taken. Listens on 127.0.0.1 unless --host says otherwise.",
        )
    )
    for flag, options in _OPTIONS.items():
        parser.add_argument(flag, **options)
    args = parser.parse_args(list(argv))
    validate_parsed_serve_args(args)
    if args.model_tag is None:
        parser.error("name a model: ppcore serve MODEL")
    args.model = args.model_tag
    args.host = args.host or "127.0.0.1"
    if not (args.api_key or args.uds or is_loopback(args.host)):
        raise SetupError(
            f"--host {args.host} can be reached from other machines, and a trace is code that this "
            "server runs; add --api-key KEY, or listen on 127.0.0.1"
        )
    defaults = parser.parse_args([args.model_tag])
    defaults.model = args.model_tag
    given, usual = AsyncEngineArgs.from_cli_args(args), AsyncEngineArgs.from_cli_args(defaults)
    settings = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(AsyncEngineArgs)
        if field.name not in _OWN and getattr(given, field.name) != getattr(usual, field.name)
    }
    ours = [flag.removeprefix("--").replace("-", "_") for flag in _OPTIONS]
    settings |= {name: getattr(args, name) for name in ours if getattr(args, name) is not None}
    return args, settings


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _serve(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server

    from .model import VLLM

    address, sock = setup_server(args, reuse_port=False)
    try:
        # An asynchronous engine belongs to the loop that built it.
        model = VLLM(args.model, mode="async", dispatch=True, **settings)
        engine = model.vllm_entrypoint = Collected(model.vllm_entrypoint)
        try:
            app = await build(args, model)
            print(f"ppcore serve: {args.model} on {address}", flush=True)
            stopped = await serve_http(
                app,
                sock=sock,
                host=args.host,
                port=args.port,
                log_level=args.uvicorn_log_level,
                access_log=not args.disable_uvicorn_access_log,
                ssl_keyfile=args.ssl_keyfile,
                ssl_certfile=args.ssl_certfile,
                ssl_ca_certs=args.ssl_ca_certs,
                ssl_cert_reqs=args.ssl_cert_reqs,
                ssl_ciphers=args.ssl_ciphers,
            )
        finally:
            engine.shutdown()
        await stopped
    finally:
        sock.close()


async def build(args: argparse.Namespace, model: Any) -> Any:
    """The application: vLLM's, with nnsight's routes and the key in front of both."""
    from nnsight.modeling.vllm.serve import server
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    engine, keys = model.vllm_entrypoint, list(args.api_key or ())
    tasks = await engine.get_supported_tasks()
    # vLLM's own check wants its header from nnsight's clients too, which send another.
    args.api_key = None
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    server.set_model(model)
    for route in server.app.routes:
        if getattr(route, "path", "").startswith("/v1/nnsight/"):
            app.router.routes.append(route)
    if keys:
        # vLLM has built its stack by now; this goes in front of it.
        app.middleware_stack = KeyCheck(app.middleware_stack or app.build_middleware_stack(), keys)
    return app


class KeyCheck:
    """ASGI middleware that wants one of ``keys``, in OpenAI's header or nnsight's.

    Only ``/health`` is open, so that a probe needs no secret.
    """

    def __init__(self, app: Any, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] != "/health":
            headers = dict(scope["headers"])
            given = headers.get(b"ndif-api-key", b"")
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() == b"bearer":
                given = token
            # All are compared, so that the time tells nothing of which came close.
            known = [hmac.compare_digest(given, key) for key in self.keys]
            if not any(known):
                from starlette.responses import JSONResponse

                refusal = JSONResponse({"detail": "Invalid API key"}, status_code=401)
                await refusal(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Collected:
    """The engine, as the API server sees it: what an edit did for a request ends with that request.

    A trace's own client collects what it saved. A request of the OpenAI routes has nobody who does, and
    an installed edit ran for it as well; uncollected, its values would stay on every rank.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._edited = False
        self._collects: set[asyncio.Task[Any]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, noting the first edit."""
        self._edited = self._edited or method == "nnsight_register"
        return await self._engine.collective_rpc(method, *args, **kwargs)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """vLLM's stream of outputs; a stream that is closed early aborts the request."""
        stream = self._engine.generate(prompt, sampling_params, request_id, **kwargs)
        output = None
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()
            traced = "nnsight_mediator" in (sampling_params.extra_args or {})
            if self._edited and not traced:
                await self._collect(request_id, output)

    async def _collect(self, request_id: str, output: Any) -> None:
        from nnsight.modeling.vllm.engines.engine import acollect

        finished = output if output is not None and output.finished else None
        # Kept alive and shielded: a client that hangs up cancels the stream, and not this.
        task = asyncio.ensure_future(acollect(self._engine, request_id, finished))
        self._collects.add(task)
        task.add_done_callback(self._collects.discard)
        await asyncio.shield(task)
