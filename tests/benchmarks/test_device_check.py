"""The device check: a dry run from end to end, sections that fail, and checks that notice what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import device_check
from benchmarks.device import check_kernels, check_tests, extension, peer, sanitizer, section, show, tables
from benchmarks.device.log import FAILED, LEFT_OUT, MEASURED, PASSED, Log, read_rows, within
from benchmarks.device.section import PARTS, SECTIONS, Section, run_section
from benchmarks.device.target import Target
from kvllm.attention.reference import ReferenceBackend
from kvllm.kvcache.cache import CacheShape
from kvllm.kvcache.formats import KV_FORMATS
from kvllm.kvcache.ops.plain import TorchOperations
from kvllm.models import elementwise

ROOT = Path(__file__).parents[2]
CPU = Target(torch.device("cpu"), dry_run=True)


# The dry run


@dataclass
class DryRun:
    exit_code: int
    output: str
    files: list[Path]
    content: dict[str, Any]

    def rows(self, name: str, status: str) -> dict[str, dict[str, Any]]:
        rows = self.content["sections"][name]["rows"]
        return {row["name"]: row["figures"] for row in rows if row["status"] == status}


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    folder = tmp_path_factory.mktemp("results")
    command = ["sh", "benchmarks/device_check.sh", "--dry-run", "--commit", "abc", "--output", str(folder)]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert not process.stderr, process.stderr
    files = list(folder.iterdir())
    return DryRun(process.returncode, process.stdout, files, json.loads(files[0].read_text()))


@pytest.mark.long
def test_a_dry_run_goes_through_every_section(dry_run: DryRun) -> None:
    found = {name: result["status"] for name, result in dry_run.content["sections"].items()}
    left_out = ("sanitizer", "tests", "graphs")  # which need a GPU
    assert found == {**dict.fromkeys(SECTIONS, "passed"), **dict.fromkeys(left_out, LEFT_OUT)}, dry_run.output
    assert list(found) == list(SECTIONS)
    assert dry_run.exit_code == 0 and "Not passed: none. Left out: sanitizer, tests, graphs." in dry_run.output


@pytest.mark.long
def test_a_dry_run_never_looks_like_a_device(dry_run: DryRun) -> None:
    assert [file.name for file in dry_run.files] == ["dry-run-abc.json"]
    assert dry_run.content["dry_run"] is True and "no device" in dry_run.content["device"]["name"]
    assert "no figure below is one of a device" in dry_run.output
    titles = [line for line in dry_run.output.splitlines() if any(entry.title in line for entry in SECTIONS.values())]
    assert len(titles) == len(SECTIONS) and all(line.startswith("DRY RUN: ") for line in titles)


@pytest.mark.long
def test_the_report_says_what_ran_where(dry_run: DryRun) -> None:
    content = dry_run.content
    assert content["commit"] == "abc" and content["versions"]["torch"] == torch.__version__
    assert content["command"].startswith("python -m benchmarks.device_check --dry-run")
    assert {"cpu", "cores", "system"} <= set(content["machine"]) and "triton" in content["versions"]
    assert content["command"] in dry_run.output and torch.__version__ in dry_run.output


@pytest.mark.long
def test_a_dry_run_checks_every_kernel(dry_run: DryRun) -> None:
    names = list(dry_run.rows("kernels", PASSED))
    backends = ["cpu", "reference", *(["triton"] if find_spec("triton") else [])]
    for what in ("decodes and chunks", "decodes alone", "decodes of very different lengths"):
        for backend in backends:
            assert any(name.startswith(f"{what}: {backend},") for name in names)
    for what in ("store", "copy blocks", "compact"):
        for mover in ("torch", "CPU operators", *(["Triton kernels"] if find_spec("triton") else [])):
            assert any(name.startswith(f"{what}: {mover},") for name in names)
    for what in ("scores", "token2chunk", "attention mass", "rms_norm", "silu_mul", "rotary"):
        assert any(name.startswith(what) for name in names)
    errors = [figures for figures in dry_run.rows("kernels", PASSED).values() if "error" in figures]
    assert len(errors) > 10 and all(0 <= figures["error"] <= figures["allowed"] for figures in errors)


@pytest.mark.long
def test_a_dry_run_checks_quantized_caches_and_draws(dry_run: DryRun) -> None:
    names = list(dry_run.rows("quantized", PASSED))
    for kv_cache_dtype in KV_FORMATS if find_spec("triton") else ():
        for what in ("decodes and chunks:", "scores of windows:", "store: Triton kernels,", "move: Triton kernels,"):
            assert any(name.startswith(f"{what} {kv_cache_dtype}, ") for name in names), (what, kv_cache_dtype)
    draws = list(dry_run.rows("sampling", PASSED))
    for what in ("most likely tokens", "top-p", "all of these in a batch", "sampling with seeds"):
        assert any(name.startswith(what) for name in draws)


@pytest.mark.long
def test_a_dry_run_checks_the_engine(dry_run: DryRun) -> None:
    rows = dry_run.rows("engine", PASSED)
    assert rows["Qwen3-0.6B, float32"]["equal"] == 1.0
    assert "Qwen3-0.6B, float32, all memory NaN before it is written" in rows
    assert rows["kara, periodic, with graphs"]["windows"] > 0


@pytest.mark.long
def test_golden_vectors_are_found(dry_run: DryRun) -> None:
    assert len(dry_run.rows("vectors", PASSED)) == 15 and not dry_run.rows("vectors", LEFT_OUT)


@pytest.mark.long
def test_every_measurement_has_its_floor(dry_run: DryRun) -> None:
    for name, time_field, floor_field in (
        ("times", "kernel_seconds", "kernel_floor_seconds"),
        ("decode", "step_seconds", "step_floor_seconds"),
        ("transformers", "step_seconds", "step_floor_seconds"),
    ):
        rows = dry_run.rows(name, MEASURED)
        assert rows and all(row[time_field] > 0 and row[floor_field] > 0 for row in rows.values())
    assert all(figures for figures in dry_run.rows("ceilings", MEASURED).values())


@pytest.mark.long
def test_steps_stand_beside_those_of_transformers(dry_run: DryRun) -> None:
    ours, theirs = (dry_run.rows(name, MEASURED) for name in ("decode", "transformers"))
    assert set(theirs) <= set(ours)
    comparison = show.compare(dry_run.content["sections"])
    assert comparison and comparison in dry_run.output


@pytest.mark.long
def test_events_have_phases_and_a_longest_stall(dry_run: DryRun) -> None:
    rows = dry_run.rows("events", MEASURED)
    of_events = rows["3 sequences"]
    assert of_events["windows_of_an_event"] >= 1
    for phase in ("recompute", "score", "compact"):
        assert of_events[f"{phase}_of_event_seconds"] > 0
    assert all(row["longest_step_seconds"] >= row["step_seconds"] > 0 for row in rows.values())


@pytest.mark.long
def test_tables_compare_with_the_full_cache(dry_run: DryRun) -> None:
    rows = dry_run.rows("tables", MEASURED)
    assert list(rows) == [f"at most 4: {name}" for name in ("vanilla", "periodic", "pressure", "snapkv")]
    vanilla, periodic = rows["at most 4: vanilla"], rows["at most 4: periodic"]
    assert vanilla["gain"] == 0 and vanilla["windows_compressed"] == 0 < periodic["windows_compressed"]
    gain = periodic["output_tokens_per_s"] / vanilla["output_tokens_per_s"] - 1
    assert periodic["gain"] == pytest.approx(gain)


# Sections that do not go well

Write = Callable[[str, str], Section]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the body of a section's `run`, and returns the section."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, body: str) -> Section:
        lines = ["import os, subprocess, sys, time", "def run(target, log):", '    log.check("before", lambda: None)']
        (tmp_path / f"{name}.py").write_text("\n".join([*lines, *(f"    {line}" for line in body.splitlines())]))
        return Section(name, 30, f"The section {name}", "correctness")

    return write


def test_an_exception_is_reported_and_other_sections_run(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = 'log.check("a row", lambda: 1 / 0)\nraise RuntimeError("on purpose")'
    sections = {"bad": write("bad_section", body), "good": write("good_section", "pass")}
    monkeypatch.setattr(device_check, "SECTIONS", sections)
    assert not device_check.check_device(["--dry-run", "--output", str(tmp_path / "out"), "--commit", "abc"])
    found = json.loads((tmp_path / "out" / "dry-run-abc.json").read_text())["sections"]
    assert found["good"]["status"] == "passed" and found["good"]["error"] is None
    assert found["bad"]["status"] == "failed" and "RuntimeError: on purpose" in found["bad"]["error"]
    assert [row["status"] for row in found["bad"]["rows"]] == [PASSED, FAILED]
    assert "ZeroDivisionError" in found["bad"]["rows"][1]["error"]
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("on purpose", "FAILED: a row", "ZeroDivisionError", "Not passed: bad"))


def test_a_crash_keeps_what_was_found(write: Write, tmp_path: Path) -> None:
    found = run_section("crash", write("crashing_section", "os.abort()"), 30, True, tmp_path / "rows")
    assert found["status"] == "failed" and [row["name"] for row in found["rows"]] == ["before"]
    assert "Aborted" in found["error"]


def test_a_hanging_section_is_killed_with_all_that_it_started(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over as soon as it hangs, however long this machine takes to get there."""
    body = f"""child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "new")!r}, "w").write(str(child.pid))
os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "pid")!r})
time.sleep(600)"""
    wait, limits = subprocess.Popen.wait, []

    def wait_until_it_hangs(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:
            return wait(process)
        limits.append(timeout)
        while process.poll() is None and not (tmp_path / "pid").exists():
            time.sleep(0.05)
        return wait(process, 0)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_it_hangs)
    found = run_section("hang", write("hanging_section", body), 60, True, tmp_path / "rows")
    assert limits == [60 + section.GRACE_SECONDS] and found["status"] == "timed out"
    assert [row["name"] for row in found["rows"]] == ["before"]
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_section_knows_how_much_time_it_has(tmp_path: Path) -> None:
    log = Log(tmp_path / "rows", 5.0)
    assert 4 < log.seconds_left <= 5
    log = Log(tmp_path / "rows", 0.0)
    log.check("too late", lambda: 1 / 0)
    assert [(row["status"], row["reason"]) for row in read_rows(log.file)] == [(LEFT_OUT, "there is no time left")]


def test_sections_without_time_are_left_out(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_check, "SECTIONS", {"a": write("first_section", "pass"), "b": write("other", "pass")})
    monkeypatch.setattr(device_check, "TOTAL_SECONDS", section.GRACE_SECONDS + device_check.LEAST_SECONDS + 0.5)
    assert device_check.check_device(["--dry-run", "--output", str(tmp_path / "out"), "--commit", "abc"])
    found = json.loads((tmp_path / "out" / "dry-run-abc.json").read_text())["sections"]
    assert [result["status"] for result in found.values()] == ["passed", LEFT_OUT]
    printed = capsys.readouterr().out
    assert "run it alone with --sections b" in printed and "Not passed: none. Left out: b." in printed


def test_parts_come_in_their_order_and_have_ten_minutes_each(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(dict.fromkeys(entry.part for entry in SECTIONS.values() if entry.part)) == PARTS
    sections = {"a": write("of_first_part", "pass"), "b": write("of_second_part", "pass")._replace(part="figures")}
    monkeypatch.setattr(device_check, "SECTIONS", sections)
    monkeypatch.setattr(device_check, "TOTAL_SECONDS", section.GRACE_SECONDS + device_check.LEAST_SECONDS + 0.5)
    assert device_check.check_device(["--dry-run", "--output", str(tmp_path), "--commit", "abc"])
    found = json.loads((tmp_path / "dry-run-abc.json").read_text())["sections"]
    assert {name: result["status"] for name, result in found.items()} == {"a": "passed", "b": "passed"}


@pytest.mark.parametrize(
    "names, expected",
    [
        (["decode"], [["extension", "decode"]]),
        (["memory", "kernels"], [["extension", "kernels"], ["graphs"]]),
        (["extension"], [["extension"]]),
    ],
    ids=str,
)
def test_sections_that_run(names: list[str], expected: list[list[str]]) -> None:
    args = device_check.parse_arguments(["--sections", *names])
    assert device_check.chosen_sections(args.sections) == expected


def test_all_sections_run_if_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = device_check.chosen_sections(device_check.parse_arguments([]).sections)
    assert [name for part in chosen for name in part] == list(SECTIONS)
    assert [part[-1] for part in chosen] == ["sanitizer", "tests", "graphs", "transformers"]
    with pytest.raises(SystemExit):
        device_check.parse_arguments(["--sections", "kernel"])
    assert "invalid choice: 'kernel'" in capsys.readouterr().err


# compute-sanitizer


def install_sanitizer(monkeypatch: pytest.MonkeyPatch, folder: Path, *, last: str) -> None:
    """A program of that name which runs what it is given, without its own options, then `last`."""
    program = folder / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\nwhile [ "${{1#--}}" != "$1" ]; do shift 2; done\n"$@"\n{last}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    "body, last, status, text",
    [
        ("pass", "exit 0", PASSED, None),
        (
            "pass",
            "echo Invalid __global__ write; exit 86",
            FAILED,
            "memcheck found something.*Invalid __global__ write",
        ),
        ("log.check('a kernel', lambda: 1 / 0)", "exit 0", FAILED, "'failed': 1"),
        ("pass", "echo Error: Device not supported; exit 1", LEFT_OUT, "does not support this device"),
        ("os.abort()", "exit $?", FAILED, "memcheck ended with exit code"),
    ],
    ids=["nothing", "a write", "a wrong result", "an old driver", "a crash"],
)
def test_what_compute_sanitizer_finds(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, last: str, status: str, text: str | None
) -> None:
    install_sanitizer(monkeypatch, tmp_path, last=last)
    found = sanitizer.find_sanitizer()
    assert found and found == str(tmp_path / "compute-sanitizer")
    command = sanitizer.command
    monkeypatch.setattr(sanitizer, "command", lambda *names: [*command(*names), "--dry-run"])
    module = write("under_a_tool", body).module
    rows = rows_of(tmp_path, lambda log: log.check("it", lambda: sanitizer.check_under(found, "memcheck", module, 60)))
    assert rows["it"]["status"] == status
    assert text is None or re.search(text, rows["it"].get("error") or rows["it"]["reason"], re.DOTALL)
    if status == PASSED:
        assert rows["it"]["figures"] == {"checks_made": 1, "checks_left_out": 0}


def test_without_compute_sanitizer_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    rows = rows_of(tmp_path, lambda log: sanitizer.run(Target(torch.device("cuda", 0), dry_run=False), log))
    assert list(rows)[:2] == ["memcheck: kernels", "memcheck: sampling"] and len(rows) == 6
    assert all("no compute-sanitizer on the PATH" in row["reason"] for row in rows.values())


def test_tables_share_out_their_time() -> None:
    assert tables.share_out(60) == (0, 0.0)
    for seconds, expected in ((150, 2), (480, 6), (1000, 13), (2000, 13)):
        count, each = tables.share_out(seconds)
        assert count == expected and count * (each + tables.LOAD_SECONDS) == pytest.approx(seconds)


def test_steps_of_transformers_are_those_in_which_all_decode() -> None:
    stamps = [[1.0, 2.0, 3.0, 5.0, 8.0], [3.0, 5.0, 8.0, 8.1, 8.2], [2.0, 3.0, 5.0, 8.0, 8.1]]
    assert peer.common_intervals(stamps) == [2.0, 3.0]
    assert peer.common_intervals([[1.0, 2.0], [3.0, 4.0]]) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.device_check", "--output", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 1 and not list(tmp_path.iterdir())
    assert "error: torch finds no CUDA device" in process.stderr and "--dry-run" in process.stderr


def test_the_wrapper_names_the_packages_that_are_absent(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    python.chmod(0o755)
    (tmp_path / "packages" / "msgspec").mkdir(parents=True)
    command = ["sh", "benchmarks/device_check.sh", "--packages", str(tmp_path / "packages"), "--dry-run"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHON": str(python)}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    absent = process.stderr.splitlines()[0].partition("lacks: ")[2].split()
    assert process.returncode == 2
    assert {"torch", "transformers", "matplotlib"} <= set(absent) and "msgspec" not in absent


def test_what_a_bare_machine_lacks_is_collected(tmp_path: Path) -> None:
    """Wheels come from the index that pip is set to, here a folder."""
    version = re.search(r"^msgspec==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version
    name = f"msgspec-{version[1]}"
    (tmp_path / "index").mkdir()
    with zipfile.ZipFile(tmp_path / "index" / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: msgspec\nVersion: {version[1]}\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PYTHON": sys.executable}
    command = ["sh", "benchmarks/device_pack.sh", str(tmp_path / "packages")]
    process = subprocess.run(command, cwd=ROOT, env={**os.environ, **pip}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    operators = {file.name for file in (ROOT / "kvllm").glob("_C*.so")}
    assert {file.name for file in (tmp_path / "packages").iterdir()} == {f"{name}-py3-none-any.whl", *operators}


def test_operators_that_were_brought_along_are_used_where_there_are_none(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for folder in (checkout / "benchmarks", checkout / "kvllm", tmp_path / "packages"):
        folder.mkdir(parents=True)
    for name in ("benchmarks/device_check.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    for name in ("_C.abi3.so", "_C_cuda.abi3.so"):
        (tmp_path / "packages" / name).write_text("brought along")
    (checkout / "kvllm" / "_C.abi3.so").write_text("built here")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages: nothing more is run
    python.chmod(0o755)
    command = ["sh", str(checkout / "benchmarks" / "device_check.sh"), "--packages", str(tmp_path / "packages")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHON": str(python)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode == 2
    found = {file.name: file.read_text() for file in (checkout / "kvllm").iterdir()}
    assert found == {"_C.abi3.so": "built here", "_C_cuda.abi3.so": "brought along"}


# Checks that notice


def rows_of(tmp_path: Path, check: Callable[[Log], None]) -> dict[str, dict[str, Any]]:
    log = Log(tmp_path / "rows", 60)
    check(log)
    return {row["name"]: row for row in read_rows(log.file)}


def test_an_output_that_is_not_written_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ReferenceBackend.run

    def all_but_the_last_row(self: ReferenceBackend, layer: int, queries: torch.Tensor, plan: Any) -> torch.Tensor:
        output = torch.empty_like(queries)
        output[:-1] = run(self, layer, queries, plan)[:-1]
        return output

    def check(log: Log) -> None:
        with check_kernels.poisoned():
            check_kernels.check_backend(CPU, log, "reference", 16, 2, 16, torch.float32)

    assert {row["status"] for row in rows_of(tmp_path, check).values()} == {PASSED}
    monkeypatch.setattr(ReferenceBackend, "run", all_but_the_last_row)
    rows = rows_of(tmp_path, check)
    failed = {name.partition(":")[0] for name, row in rows.items() if row["status"] == FAILED}
    assert failed == {
        "decodes and chunks",
        "decodes alone",
        "decodes of very different lengths",
        "heads of different lengths",
    }
    assert all("error nan" in row["error"] for row in rows.values() if row["status"] == FAILED)


def test_a_wrong_movement_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compact, shape = TorchOperations.compact, CacheShape(2, 3, 16, 16, torch.float32)
    off_by_one = lambda self, kept, *blocks: compact(self, (kept - 1).clamp(min=-1), *blocks)  # noqa: E731
    monkeypatch.setattr(TorchOperations, "compact", off_by_one)
    rows = rows_of(tmp_path, lambda log: check_kernels.check_movement(CPU, log, "torch", shape, TorchOperations))
    assert {name.partition(":")[0] for name, row in rows.items() if row["status"] == FAILED} == {"compact"}


def test_lost_digits_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = elementwise.silu_mul
    monkeypatch.setattr(elementwise, "silu_mul", lambda x: exact(x.bfloat16()).to(x.dtype))
    rows = rows_of(tmp_path, lambda log: check_kernels.check_elementwise(CPU, log))
    failed = [name for name, row in rows.items() if row["status"] == FAILED]
    assert failed == ["silu_mul: 3 x 40, float32"]


def test_no_number_is_no_small_error() -> None:
    assert within(0.5, 0.5) == {"error": 0.5, "allowed": 0.5}
    for error in (0.6, float("nan")):
        with pytest.raises(AssertionError, match="is above 0.5"):
            within(error, 0.5)


def test_tests_become_rows(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_other(): assert False\n"
        "@pytest.mark.gpu\n"
        "class TestOfGpu:\n"
        "    def test_adds(self): assert 1 + 1 == 2\n"
        "    def test_fails(self): assert 1 + 1 == 3\n"
        "    def test_skips(self): pytest.skip('not today')\n"
        "    def test_lacks(self, fixture): pass\n"
    )
    broken = tmp_path / "test_broken.py"
    broken.write_text("import nothing_of_this_name  # pytest.mark.gpu\n")
    rows = rows_of(tmp_path, lambda log: check_tests.run_tests(log, [file, broken]))
    found = {name.rpartition("/")[2].rpartition("::")[2]: row for name, row in rows.items()}
    assert {name: row["status"] for name, row in found.items()} == {
        "test_broken.py": FAILED,
        "test_adds": PASSED,
        "test_fails": FAILED,
        "test_skips": LEFT_OUT,
        "test_lacks": FAILED,
    }
    assert "assert (1 + 1) == 3" in found["test_fails"]["error"] and "nothing_of" in found["test_broken.py"]["error"]
    assert "not today" in found["test_skips"]["reason"]


def test_the_files_with_tests_for_a_gpu_are_found() -> None:
    assert check_tests.has_marked(ROOT / "tests" / "compression" / "test_kara.py")
    assert check_tests.has_marked(ROOT / "tests" / "worker" / "test_graphs.py")
    assert not check_tests.has_marked(ROOT / "tests" / "core" / "test_scheduler.py")
    assert not check_tests.has_marked(Path(__file__))  # which only writes such tests


def test_what_cannot_be_built_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "BUILD", [sys.executable, "-c", "import sys; sys.exit('no compiler')"])
    with pytest.raises(RuntimeError, match="no compiler"):
        extension.build()
