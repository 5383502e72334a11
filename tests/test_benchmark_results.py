"""What the results of benchmarks are made into: series, tables and pictures, over the floor that units give."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import plots, report, units
from benchmarks.cases import Case
from benchmarks.plan import FIRST, PROCESS
from mhc_compile.kernels import boundary_pass
from mhc_compile.kernels.common import recorded
from tests.kernels.count_units import count

CPU = torch.device("cpu")
RESULTS = Path(__file__).parent.parent / "results"
TINY = Case("chain", 6, 32, depth=2, dtype="float32")


def one(value: float) -> dict[str, float]:
    return {"median": value, "p20": value, "p80": value, "runs": 5}


def entry(case: Case, provider: str = "mhc", **measured: Any) -> dict[str, Any]:
    return {"case": case.as_json(), "provider": provider, "status": "ok", **measured}


def results(folder: Path) -> Path:
    """A file of results with known numbers: the main shape at twice, one token at four times the floor."""
    whole = {"step_ms": one(3.0), "step_floor_ms": 1.5, "forward_units": 18.0, "step_units": 48.0}
    whole |= {"peak_units": 6.5, "peak_bytes": 2**30, "first_call_seconds": 3.0}
    listed = [
        entry(TINY, forward_ms=one(2.0), forward_floor_ms=1.0, **whole),
        entry(TINY, "inductor", forward_ms=one(5.0), forward_floor_ms=1.0),
        entry(replace(TINY, tokens=1), forward_ms=one(4.0), forward_floor_ms=1.0),
        entry(replace(TINY, tokens=1, modes=("graph",)), graph_ms=one(0.02)),
        entry(replace(TINY, width=64), forward_ms=one(6.0), forward_floor_ms=1.0),
        entry(replace(TINY, tokens=1024, width=64, streams=2), forward_ms=one(9.0), forward_floor_ms=1.0),
        entry(replace(TINY, name="long", depth=32), peak_units=3.0, peak_bytes=2**31),
        entry(replace(TINY, name="block"), step_ms=one(5.0)),
        entry(replace(TINY, name="plain"), step_ms=one(4.0)),
        entry(replace(TINY, modes=FIRST), first_step_seconds={"cold": 3.0, "warm": 1.0}),
        entry(replace(TINY, modes=PROCESS), process_seconds={"cold": 9.0, "warm": 7.0}),
    ]
    path = folder / "results.json"
    report.save(path, report.environment(CPU), 10.0, listed)
    return path


def test_series(tmp_path: Path) -> None:
    listed = report.load(results(tmp_path))["results"]
    assert report.main_shape(listed) == {"tokens": 6, "width": 32, "streams": 4}
    forward = report.over_floor("forward")
    assert report.series(listed, "tokens", forward) == {"mhc": [(1, 4.0), (6, 2.0)], "inductor": [(6, 5.0)]}
    assert report.series(listed, "width", forward) == {"mhc": [(32, 2.0), (64, 6.0)], "inductor": [(32, 5.0)]}
    assert report.series(listed, "tokens", report.over_floor("step")) == {"mhc": [(6, 2.0)]}
    assert report.main_shape([]) == {}


def test_table(tmp_path: Path) -> None:
    """What was measured of a program in several parts is one row."""
    text = report.table(report.load(results(tmp_path)))
    assert "| mhc | 1.0000 (1.0000-1.0000) | 2.00 | 18.0 | 1.5000 (1.5000-1.5000) | 2.00 | 48.0 | 6.5 |" in text
    (token,) = re.findall(r"of 2: 1 tokens.*?\n\n.*\n.*\n(.*)", text)
    assert "| 3.0 / 1.0 | 9.0 / 7.0 |" in text
    assert "| 4.00 |" in token
    assert "| 10.0 (10.0-10.0) |" in token
    assert "mhc: 20.0% of a block's training step is hyper-connections (5.00 ms with, 4.00 ms with plain" in text


def test_going_on_from_other_results(tmp_path: Path) -> None:
    path = results(tmp_path)
    about = report.environment(CPU)
    assert len(report.continued(path, about)) == 11
    with pytest.raises(ValueError, match=r"its torch is .*, here it is 1\.0"):
        report.continued(path, about | {"torch": "1.0"})
    failed = [entry(TINY) | {"status": status} for status in ("failed", "unavailable", "refused", "skipped")]
    report.save(path, about, 10.0, failed)
    assert [r["status"] for r in report.continued(path, about)] == ["refused", "skipped"]


def test_plots(tmp_path: Path) -> None:
    """One picture for each question that the file answers."""
    pytest.importorskip("matplotlib", reason="plots need matplotlib, the [bench] extra")
    assert command.main(["plot", str(results(tmp_path)), "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {f"results-{name}.png" for name in plots.PICTURES}
    report.save(tmp_path / "empty.json", report.environment(CPU), 10.0, [])
    assert plots.draw(tmp_path / "empty.json", tmp_path) == []


def test_published_results_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib, the [bench] extra")
    for path in RESULTS.glob("*.json"):
        if "complete" not in json.loads(path.read_text(encoding="utf-8")):  # of another benchmark
            continue
        expected = "share" if path.stem.endswith("-block") else "time"
        assert tmp_path / f"{path.stem}-{expected}.png" in plots.draw(path, tmp_path)


def test_other_files_are_not_results(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"other\.json: not a results file of format 1"):
        report.load(path)


@pytest.mark.parametrize("name", ["communication", "h200-x2-layers", "h200-x4-scaling"])
def test_results_of_another_benchmark_are_named(name: str) -> None:
    with pytest.raises(SystemExit, match=f"{name}.json: another benchmark's results, which have no case"):
        command.main(["table", str(RESULTS / f"{name}.json")])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_units_are_what_the_kernels_are_given(n: int, many: bool) -> None:
    assert count(n, many=many) == {op: units.units(op, n, many=many) for op in units.OPERATORS}


@pytest.mark.parametrize("width", [1024, 1984, 1985, 4096])
@pytest.mark.parametrize("tokens", [1, 383, 384, 6143, 6144])
def test_many_tokens_are_those_of_the_kernels(tokens: int, width: int) -> None:
    x = torch.empty(tokens, 4, width, device="meta")
    with recorded(lambda *args: None, replayed=True):
        assert units.are_many(tokens, width) == boundary_pass.pays(x)


def test_units_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parent.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    # | operator | launches | units | ..., and | operator, backward | units, units | ...
    whole = re.findall(r"^\| (\w+) \|[^|]*\| (\d+) \|", text, re.MULTILINE)
    steps = re.findall(r"^\| (\w+), backward \| (\d+), (\d+) \|", text, re.MULTILINE)
    written = {name: int(number) for name, number in whole if name in units.OPERATORS}
    for name, forward, backward in steps:
        written |= {name: int(forward), f"{name}_backward": int(backward)}
    assert len(written) == 8
    assert written == {name: units.units(name, 4) for name in written}


def test_floors() -> None:
    """10 units forward and 29 with backward at n = 4; 8,192 x 4,096 bfloat16 at 2,970 GB/s as counted by hand."""
    assert (units.floor("forward", 4), units.floor("step", 4)) == (10, 29)
    assert units.milliseconds(10, 8192, 4096, 2, 2970) == pytest.approx(0.226, abs=5e-4)
    assert units.milliseconds(29, 8192, 4096, 2, 2970) == pytest.approx(0.655, abs=5e-4)
