"""House rules that a machine can check: layers, sizes, and what a commit may name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The command line belongs to the engine's layer: it may reach ppcore.vllm, once a command asks.
FRONT_ENDS = {"ppcore.cli", "ppcore.__main__"}

# What would let a decision depend on anything but the events that came in.
IMPURE = set(
    "asyncio concurrent datetime multiprocessing os pathlib random secrets select selectors socket "
    "ssl subprocess tempfile threading time uuid".split()
)

MAX_LINES = 500
LONG_ON_PURPOSE = {
    "ppcore/core.py": "the protocol is one state machine, and is read as one",
    "ppcore/runtime/lazy.py": "a lazy is one class, and its parts know each other's insides",
}

DOCUMENTS = {".md"}
TEXT = DOCUMENTS | {"", ".cfg", ".css", ".html", ".json", ".py", ".svg", ".toml", ".txt", ".yml"}


@cache
def committed() -> tuple[Path, ...]:
    """Files that are committed or would be: what git tracks, and what it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in sorted(set(listed.stdout.decode().split("\0"))) if name)
    return tuple(path for path in paths if path.is_file())


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of a package."""
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(name: str, path: Path, *, module_level: bool = False) -> set[str]:
    """Absolute names of what a module imports; with `module_level`, when it is itself imported."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            # `from package import module` imports that module too; a name that is none is harmless.
            found.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree(path))
    return found


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def core_modules() -> list[tuple[str, Path]]:
    return [
        (name, path)
        for name, path in modules("ppcore")
        if not within(name, "ppcore.runtime", "ppcore.vllm") and name not in FRONT_ENDS
    ]


def test_the_core_imports_the_standard_library_and_itself_and_nothing_impure() -> None:
    names = {name for name, _ in core_modules()}
    assert "ppcore" in names
    for name, path in core_modules():
        for imported in imports(name, path):
            top = imported.partition(".")[0]
            if top == "ppcore":
                assert not within(imported, "ppcore.runtime", "ppcore.vllm", *FRONT_ENDS), (
                    f"{name} imports {imported}"
                )
            else:
                assert top in sys.stdlib_module_names, f"{name} imports {imported}"
                assert top not in IMPURE, f"{name} imports {imported}"


def test_front_ends_load_the_engine_only_when_a_command_asks() -> None:
    for name, path in modules("ppcore"):
        if name in FRONT_ENDS:
            for imported in imports(name, path, module_level=True):
                assert imported.partition(".")[0] in {"ppcore", *sys.stdlib_module_names}, imported
                assert not within(imported, "ppcore.runtime", "ppcore.vllm"), imported


def test_the_runtime_knows_no_engine() -> None:
    for name, path in modules("ppcore.runtime"):
        for imported in imports(name, path):
            assert not within(imported, "vllm", "ppcore.vllm", *FRONT_ENDS), (
                f"{name} imports {imported}"
            )


def test_the_simulator_knows_no_engine_and_nothing_knows_the_simulator() -> None:
    for name, path in modules("ppsim"):
        for imported in imports(name, path):
            assert not within(imported, "vllm", "ppcore.vllm", *FRONT_ENDS), (
                f"{name} imports {imported}"
            )
    for name, path in modules("ppcore"):
        for imported in imports(name, path):
            assert not within(imported, "ppsim"), f"{name} imports {imported}"


@pytest.mark.parametrize("module", ["ppcore", "ppcore.__main__"])
def test_importing_the_core_loads_no_heavy_package(module: str) -> None:
    heavy = ["torch", "greenlet", "numpy", "nnsight", "transformers", "vllm"]
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Spelled in pieces, so that this file does not name them.
UNSPEAKABLE = [
    re.compile(rf"(?<![\w.-]){'[.]'.join(host)}(?!\w)", re.IGNORECASE)
    for host in (
        ["pypi", "org"],
        [r"\w+", "pythonhosted", "org"],
        [r"\w+", "pytorch", "org"],
        [r"\w+", "debian", "org"],
        [r"\w+", "npmjs", "org"],
        ["proxy", "golang", "org"],
        ["crates", "io"],
        ["conda", "anaconda", "org"],
    )
] + [
    re.compile(rf"(?<![\w.}}-])/{path}(?![\w-])")
    for path in ("work", "root", "opt/venv", "opt/wheels", "opt/pypi", "tmp/w")
]


def test_no_committed_file_names_a_registry_or_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in committed()
        if path.suffix in TEXT
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if any(pattern.search(line) for pattern in UNSPEAKABLE)
    ]
    assert not found, "\n".join(found)


def test_long_files_are_long_on_purpose() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in committed()
        if path.suffix == ".py"
    }
    long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    unexplained = {name: length for name, length in long.items() if name not in LONG_ON_PURPOSE}
    assert not unexplained, f"over {MAX_LINES} lines: split, or say why in LONG_ON_PURPOSE"
    assert LONG_ON_PURPOSE.keys() <= long.keys(), "no longer long: remove from LONG_ON_PURPOSE"


# --- documents name what exists ---------------------------------------------------------------


def bindings(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Names that a module's or class's body binds, in branches too."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                found.update({n.id: node for n in ast.walk(target) if isinstance(n, ast.Name)})
        elif isinstance(node, ast.AnnAssign):
            if isinstance(node.target, ast.Name):
                found[node.target.id] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.update({(alias.asname or alias.name): node for alias in node.names})
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                found.update(bindings(getattr(node, part, [])))
    return found


def exists(dotted: str) -> bool:
    """Whether a dotted name leads to a module, or to something that its source binds."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:cut])
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if path.is_file():
            break
        if cut == len(parts) and base.is_dir():
            return True  # a package whose __init__ is yet to come
    else:
        return False
    body = tree(path).body
    for part in parts[cut:]:
        bound = bindings(body)
        if part not in bound:
            # `__getattr__` may bring names late; then the text itself has to mention them.
            return "__getattr__" in bound and f'"{part}"' in path.read_text(encoding="utf-8")
        if not isinstance(bound[part], ast.ClassDef):
            return True
        body = bound[part].body  # type: ignore[attr-defined]
    return True


REFERENCE = re.compile(
    r"`((?:ppcore|ppsim)(?:\.\w+)+)(?:\(\))?`|\]\[((?:ppcore|ppsim)(?:\.\w+)+)\]"
)
IMPORT = re.compile(r"^\s*from ((?:ppcore|ppsim)[.\w]*) import (\w+(?:, \w+)*)", re.MULTILINE)


def referenced(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    names = {code or link for code, link in REFERENCE.findall(text)}
    if path.suffix in DOCUMENTS:
        for module, imported in IMPORT.findall(text):
            names.update(f"{module}.{name}" for name in imported.split(", "))
    # A file of the package, as in `ppcore.egg-info` or `ppcore.py`, is no symbol.
    return {name for name in names if not name.endswith((".py", ".svg", ".md"))}


def test_documents_name_symbols_that_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in committed()
        if path.suffix in DOCUMENTS or (path.suffix == ".py" and path != Path(__file__))
        for name in sorted(referenced(path))
        if not exists(name)
    ]
    assert not missing, "\n".join(missing)


def test_documents_link_to_files_that_exist() -> None:
    broken = []
    for path in committed():
        if path.suffix in DOCUMENTS:
            for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
                file = target.partition("#")[0]
                if file and "://" not in file and not (path.parent / file).exists():
                    broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert not broken, "\n".join(broken)


def test_the_changelog_knows_this_version() -> None:
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "ppcore/__init__.py").read_text(), re.MULTILINE
    )
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


# --- the rules themselves find what they look for -----------------------------------------------


def test_the_rules_see_a_breach(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import torch.nn\nfrom . import runtime\nfrom .vllm import x\n"
        "def f():\n    from ..elsewhere import y\n"
    )
    found = imports("ppcore.module", module)
    assert {"torch.nn", "ppcore.runtime", "ppcore.vllm", "elsewhere"} <= found
    assert "elsewhere" not in imports("ppcore.module", module, module_level=True)
    assert not exists("ppcore.core.NoSuchThing") and not exists("ppcore.nothing")
    assert exists("ppcore") and exists("ppcore.vllm.checkpoints.smollm2")
    for breach in ("https://files." + "pythonhosted.org/x", "cd /" + "work/main", "`/" + "root`"):
        assert any(pattern.search(breach) for pattern in UNSPEAKABLE), breach
    for fine in ("homework/main", "docs/work/x", "the/root/of", "pytorch.org's selector"):
        assert not any(pattern.search(fine) for pattern in UNSPEAKABLE), fine
