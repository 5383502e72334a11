"""`python -m benchmarks.scaling`: which runs there are, that each has GPUs of its own, and what the tables say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, scaling
from benchmarks.measure import ROOT

EXAMPLE = """
    import json, os, sys, time
    from pathlib import Path

    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    begin = time.time()
    if given["--compile"] == "eager":
        sys.exit("torch.OutOfMemoryError: no memory")
    time.sleep(60 if given.get("--variant") == "plain" else 0.3)
    if int(os.environ.get("RANK", 0)) == 0:
        out = Path(given["--out"])
        out.joinpath("losses.csv").write_text("step,loss\\n1,5.5\\n2,5.25\\n")
        said = {"tokens_per_second": 1000.0, "peak_bytes_of_a_device": 2**31, "began": begin, "ended": time.time()}
        said["devices"] = os.environ["CUDA_VISIBLE_DEVICES"]
        out.joinpath("summary.json").write_text(json.dumps(said))
"""


@pytest.fixture
def example(tmp_path: Path) -> Path:
    file = tmp_path / "example.py"
    file.write_text(textwrap.dedent(EXAMPLE), encoding="utf-8")
    return file


def test_each_gpu_gets_the_same_tokens() -> None:
    jobs = scaling.plan(4, "wide", layers=None, steps=12)
    assert {job.gpus for job in jobs} == {1, 2, 4}
    for job in (job for job in jobs if job.part != "layers"):
        rows = int(job.arguments[job.arguments.index("--batch") + 1])
        if job.part != "speed":
            assert rows == (1 if "tp" in job.division else 8) or not job.division, job
            continue
        context = int(job.arguments[job.arguments.index("--context") + 1])
        assert rows * context == scaling.ROWS * scaling.CONTEXT * job.gpus, job
        groups = {"tp=2": 1, "tp=4": 1, "fsdp=2,tp=2": 2}  # each has one row
        assert rows == groups.get(job.division, scaling.ROWS * job.gpus), job
    assert len({(job.part, job.division, job.mode) for job in jobs}) == len(jobs)


def test_jobs_beside_each_other_share_no_gpu(example: Path) -> None:
    divisions = ("", "fsdp=2", "", "fsdp=2")
    jobs = [scaling.Job("speed", division, "mhc", ("--compile", "mhc")) for division in divisions]
    results = list(scaling.run(jobs, range(3), example, budget=120, limit=120))
    assert [result["status"] for result in results] == 4 * ["measured"], results
    for one in results:
        assert len(one["devices"].split(",")) == one["gpus"]
        assert one["losses"] == [5.5, 5.25]
        for other in results:
            if one is not other and one["began"] < other["ended"] and other["began"] < one["ended"]:
                assert not set(one["devices"].split(",")) & set(other["devices"].split(","))


def test_what_does_not_run_has_a_status(example: Path) -> None:
    jobs = [job for job in scaling.plan(1, "nano", layers=1, steps=2) if job.mode in ("eager", "plain")]
    found = {result["mode"]: result["status"] for result in scaling.run(jobs, range(2), example, 120, limit=4)}
    assert found == {"eager": "out of memory", "plain": "out of time"}


def test_a_job_of_several_processes_says_why_it_failed(example: Path) -> None:
    job = scaling.Job("speed", "fsdp=2", "eager", ("--compile", "eager"))
    (result,) = scaling.run([job], range(2), example, budget=120, limit=120)
    assert result["status"] == "out of memory"
    assert result["said"].splitlines()[-1].endswith("torch.OutOfMemoryError: no memory")


def test_what_a_job_said_ends_before_torchrun_speaks() -> None:
    """Which ends the other processes, with a warning, and then reports an error."""
    torchrun = "0 12:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:1] "
    said = f"Traceback\nOutOfMemoryError: none\nW102{torchrun}closing 8\nTraceback\nE102{torchrun}failed\n"
    assert scaling._cause(said) == "Traceback\nOutOfMemoryError: none"
    assert scaling._cause(said.partition("W102")[0]) == "Traceback\nOutOfMemoryError: none"
    two = "OutOfMemoryError: noneOutOfMemoryError: none\n\n"  # processes that write the line and its end in turns
    assert scaling._cause(f"{two}E102{torchrun}failed\n") == two.rstrip()


def _result(division: str, mode: str, speed: float, **more: Any) -> dict[str, Any]:
    about = {"part": "speed", "division": division, "mode": mode, "gpus": scaling.gpus_of(division)}
    return about | {"status": "measured", "tokens_per_second": speed, "peak_bytes_of_a_device": 3 * 2**30} | more


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        _result("", "mhc", 900.0),
        _result("", "plain", 1000.0),
        _result("fsdp=2,tp=2", "mhc", 2000.0),
        _result("fsdp=2,tp=2", "eager", 0.0, status="out of memory"),
        _result("", "mhc", 1.0, part="losses", losses=[4.0, 2.0]),
        _result("fsdp=2", "mhc", 1.0, part="losses", losses=[4.0, 2.002]),
        _result("", "mhc", 1.0, part="losses of one row", losses=[3.0, 1.0]),
        _result("tp=2", "mhc", 1.0, part="losses of one row", losses=[3.0, 1.002]),
        _result("tp=4", "mhc", 1.0, part="losses of one row", status="failed"),
    ]
    file = tmp_path / "results.json"
    report.save(file, {"format": report.FORMAT}, 0.0, results)
    monkeypatch.setattr("sys.argv", ["scaling", "table", str(file)])
    assert scaling.main() == 0
    said = capsys.readouterr().out
    assert "| one process | 1 | - | - | 900 | 1,000 | - | 10% |" in said
    assert "| fsdp=2 x tp=2 | 4 | out of memory | - | 500 | - | - | - |" in said
    assert "| fsdp=2 x tp=2 | out of memory | - | 3.0 |" in said
    assert "| fsdp=2 | 1.0e-03 |" in said
    assert "| tp=2 | 2.0e-03 |" in said
    assert "| tp=4 | failed |" in said


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    about = {"format": report.FORMAT, "hardware": "a GPU", "torch": "2"}
    file = tmp_path / "results.json"
    report.save(file, about, 0.0, [_result("", "mhc", 900.0), _result("tp=2", "eager", 0.0, status="failed")])
    assert json.loads(file.read_text(encoding="utf-8"))["results"]
    assert scaling.draw(file, tmp_path).stat().st_size > 5000


@pytest.mark.slow
def test_decoder_layers_are_right_on_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "benchmarks.divided_layers", "--layers", "1", "--tokens", "16", "--width", "64"]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    said = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert (said["processes"], said["rewritten"], said["found"]) == (2, 4, 4)
    assert [way["recomputed"] for way in said["measured"]] == ["nothing", "streams", "layers"]
    for way in said["measured"]:
        assert max(way["errors"].values()) < 3e-6, way


def test_decoder_layers_have_a_table_of_their_own_and_wrong_ones_no_figures() -> None:
    def job(mode: str, error: float) -> dict[str, Any]:
        kernels = {"mhc": 1.0, "communication": 3.0, "others": 20.0}
        way = {"recomputed": "nothing", "errors": {"output": error, "x": 0.01}, "step_ms": 24.5, "kernels_ms": kernels}
        about = {"part": "layers", "division": "fsdp=2", "mode": mode, "gpus": 2, "status": "measured", "layers": 2}
        return about | {"measured": [way | {"peak_bytes": 3 * 2**30, "resident_bytes": 2**30}]}

    results = [job("mhc", 0.011), job("inductor", 0.2), job("plain", 0.2), job("eager", 0.01)]
    told = scaling.table({"results": results}).splitlines()
    assert "| mhc | nothing | 12.25 | 0.50 | 1.50 | 10.00 | 2.00 |" in told
    assert [line for line in told if line.startswith("| plain | nothing | 12.25")]
    (wrong,) = [line for line in told if line.startswith("| inductor")]
    assert "output is 2.0e-01 from float64" in wrong
    assert "12.25" not in wrong
