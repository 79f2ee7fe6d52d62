"""`ppcore doctor`: each check on machines that are made up, and the whole on this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ppcore import cli
from ppcore.vllm import doctor
from ppcore.vllm.doctor import Finding, machine, packages
from ppcore.vllm.doctor.engine import engine
from ppcore.vllm.doctor.finding import note, ok, problem
from ppcore.vllm.doctor.pair import pair

ROOT = Path(__file__).resolve().parents[2]
HERE = {
    "torch": "2.13.0+cpu",
    "vllm": "0.32.0",
    "nnsight": "0.8.1",
    "transformers": "5.19.0",
    "greenlet": "3.5.6",
}
GIB = 1 << 30


def statuses(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.status for finding in findings}


# --- packages ---------------------------------------------------------------------------------


def test_the_versions_that_were_tried_are_fine() -> None:
    assert set(statuses(list(packages.packages(HERE))).values()) == {"ok"}


def test_the_versions_tried_are_within_the_bounds_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = " ".join(project["optional-dependencies"]["cpu"])
    for name, version in packages.TRIED.items():
        distribution = packages.DISTRIBUTIONS.get(name, (name,))[-1]
        (least,) = re.findall(rf"\b{distribution}>=([\d.]+)", requirements)
        assert version.startswith(least), name


@pytest.mark.parametrize(
    ("version", "status"), [("0.32.7", "note"), ("0.33.0", "problem"), ("0.3.20", "problem")]
)
def test_another_version_is_a_note_and_another_series_a_problem(version: str, status: str) -> None:
    found = {finding.name: finding for finding in packages.packages({**HERE, "vllm": version})}
    assert found["vllm"].status == status
    assert "0.32.0" in found["vllm"].cure


def test_a_missing_package_is_a_problem_that_says_how_to_install_it() -> None:
    found = list(packages.packages({"torch": "2.13.0"}))
    assert statuses(found)["torch"] == "ok"
    missing = [finding for finding in found if finding.status == "problem"]
    assert {finding.name for finding in missing} == {"vllm", "nnsight", "transformers", "greenlet"}
    assert all("pip install" in finding.cure for finding in missing)


def test_cuda_builds_beside_a_cpu_torch_are_a_trap() -> None:
    (found,) = packages.traps({**HERE, "torchvision": "0.28.0", "torchcodec": "0.10"})
    assert found.status == "problem"
    assert found.cure == "pip uninstall -y torchvision torchcodec"
    (found,) = packages.traps({**HERE, "torchvision": "0.28.0+cpu"})
    assert found.status == "ok"
    assert list(packages.traps({"torch": "2.13.0", "torchvision": "0.28.0"})) == []


# --- the machine ------------------------------------------------------------------------------


def bound(said: str | None, *, ranks: int = 2, cores: int = 4, nodes: int = 1) -> dict[str, str]:
    environment = {} if said is None else {"VLLM_CPU_OMP_THREADS_BIND": said}
    return statuses(list(machine.binding(ranks, list(range(cores)), nodes, environment)))


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (None, "ok"),
        ("0-1|2-3", "ok"),
        ("0,1|2,3|1", "ok"),
        ("nobind", "ok"),
        ("0-3", "problem"),
        ("0|9", "problem"),
        ("first|second", "problem"),
    ],
)
def test_a_binding_needs_a_group_of_usable_cores_for_each_rank(
    said: str | None, status: str
) -> None:
    assert bound(said)["binding"] == status


def test_automatic_binding_needs_a_memory_node_for_each_rank() -> None:
    assert bound("auto", nodes=1)["binding"] == "problem"
    assert bound("auto", nodes=2)["binding"] == "ok"


def test_more_ranks_than_cores_are_noted() -> None:
    assert bound(None, ranks=4, cores=4)["cores"] == "ok"
    assert bound(None, ranks=4, cores=2)["cores"] == "note"


def test_memory_is_what_the_machine_and_its_container_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 6291456 kB\n")
    assert machine.memory_bytes(meminfo, tmp_path) == (8 * GIB, 6 * GIB)
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    assert machine.memory_bytes(meminfo, tmp_path) == (4 * GIB, 1 * GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes(meminfo, tmp_path) == (8 * GIB, 6 * GIB)
    assert machine.memory_bytes(tmp_path / "absent", tmp_path) is None


def test_little_memory_is_noted() -> None:
    assert machine.memory(2, (8 * GIB, 6 * GIB)).status == "ok"
    found = machine.memory(4, (8 * GIB, 6 * GIB))
    assert found.status == "note" and "VLLM_CPU_KVCACHE_SPACE" in found.cure
    assert machine.memory(2, None).status == "note"


def test_a_containers_default_of_shared_memory_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free_mib, status in ((64, "note"), (1024, "ok")):
        usage = shutil_usage(free_mib << 20)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path, usage=usage: usage)
        found = machine.shared_memory(tmp_path)
        assert found.status == status
        assert ("--shm-size" in found.cure) == (status == "note")
    monkeypatch.undo()
    assert machine.shared_memory(tmp_path / "absent").status == "note"


def shutil_usage(free: int) -> object:
    import shutil

    return type(shutil.disk_usage("/"))(free, 0, free)


def test_settings_that_change_an_engine_are_found() -> None:
    assert list(machine.settings({"VLLM_USE_V2_MODEL_RUNNER": "0"})) == []
    (found,) = machine.settings({"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert found.status == "problem"
    (found,) = machine.settings({"VLLM_PP_LAYER_PARTITION": "3,5"})
    assert found.status == "note" and "'3,5'" in found.says


def test_nodes_are_counted_as_the_system_lists_them(tmp_path: Path) -> None:
    assert machine.numa_nodes(tmp_path) == 1
    for name in ("node0", "node1", "node_list"):
        (tmp_path / name).mkdir()
    assert machine.numa_nodes(tmp_path) == 2


# --- the children -----------------------------------------------------------------------------


def saying(**found: object) -> str:
    return f"print('noise'); print('ppcore-doctor ' + {json.dumps(found)!r})"


CLASSES = {"engine": "a.Engine", "worker": "a.Worker", "runner": "a.Runner"}


def test_the_engines_classes_are_named() -> None:
    found = engine(2, child=saying(platform="cpu", devices=0, **CLASSES))
    assert found.status == "ok"
    assert found.says == "cpu: a.Engine, a.Worker, a.Runner"


def test_a_rank_without_a_device_is_a_problem() -> None:
    found = engine(2, child=saying(platform="cuda", devices=1, **CLASSES))
    assert found.status == "problem" and "1 CUDA devices for 2 ranks" in found.says


def test_an_engine_that_cannot_be_imported_is_a_problem_with_its_last_words() -> None:
    found = engine(2, child="raise ImportError('operator torchvision::nms does not exist')")
    assert found.status == "problem" and "torchvision::nms does not exist" in found.says
    found = engine(2, child="import os; os.abort()")
    assert found.status == "problem"


def test_an_import_that_does_not_end_is_ended() -> None:
    found = engine(2, timeout_s=1.0, child="import threading; threading.Event().wait()")
    assert found.status == "note" and found.says.startswith("unknown: ")


def test_two_processes_meet_and_are_measured() -> None:
    pytest.importorskip("torch")
    found = pair()
    if found.says.startswith("unknown"):
        pytest.skip(found.says)
    assert found.status in ("ok", "note"), found
    assert 0 < found.data["round_trip_s"] < 10
    assert found.data["bytes_per_s"] > 1e6


def test_a_failure_is_reported_with_what_would_mend_it() -> None:
    pytest.importorskip("torch")
    import os

    found = pair(environment={**os.environ, "GLOO_SOCKET_IFNAME": "no-such-interface"})
    if found.says.startswith("unknown"):
        pytest.skip(found.says)
    assert found.status == "problem"
    assert found.cure.startswith("set GLOO_SOCKET_IFNAME=lo")
    assert "no-such-interface" in found.says


def test_children_that_do_not_end_are_ended() -> None:
    found = pair(timeout_s=0.0)
    assert found.status == "note" and found.says.startswith("unknown: ")


# --- the command ------------------------------------------------------------------------------


def test_a_problem_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [ok("one", "is fine", n=1), note("two", "is odd", "look at it")]
    monkeypatch.setattr(doctor, "examine", lambda ranks: iter(findings))
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "ok       one           is fine",
        "note     two           is odd",
        "                       -> look at it",
        "",
        "0 problems",
    ]
    findings.append(problem("three", "is wrong", "mend it"))
    assert cli.main(["doctor", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["healthy"] is False
    assert [found["name"] for found in said["findings"]] == ["one", "two", "three"]
    assert said["findings"][0]["data"] == {"n": 1}


def test_it_runs_without_vllm_and_says_so() -> None:
    """In an interpreter that sees the standard library and this project only."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    script += "from ppcore.cli import main; sys.exit(main(['doctor', '--json']))"
    command = [sys.executable, "-I", "-S", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    said = {found["name"]: found for found in json.loads(done.stdout)["findings"]}
    assert said["vllm"]["status"] == "problem"
    assert said["vllm"]["says"] == "is not installed: no engine can start"
    assert "engine" not in said and "gloo" not in said
    assert said["memory"]["status"] in ("ok", "note")
