"""Weak scaling of `examples/train_lm.py`: the same tokens a GPU on 1, 2, 4 and 8 GPUs of one host.

    python -m benchmarks.scaling --out results/h100-x4-scaling.json    # runs that fit beside each other run at once
    python -m benchmarks.scaling table results/h100-x4-scaling.json
    python -m benchmarks.scaling plot results/h100-x4-scaling.json     # pip install '.[bench]'

Each run is a process, or a job of torchrun, of its own. What hyper-connections cost is the difference to the same model
with plain residual connections, compiled by Inductor. Other parts train a small model with the same rows under each
division, and compare losses with those of one GPU. The last one measures decoder layers of DeepSeek-V4 on two GPUs
(`benchmarks.divided_layers`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.cases import complaints
from benchmarks.measure import ROOT

DIVISIONS = ("", "fsdp=2", "tp=2", "pp=2", "ddp=2", "cp=2", "fsdp=4", "tp=4", "fsdp=2,tp=2", "fsdp=8", "fsdp=4,tp=2")
# How sublayers and connections are compiled. `plain` has residual connections, and is compiled by Inductor.
MODES = {
    "mhc": ("--compile", "mhc"),
    "inductor": ("--compile", "inductor"),
    "plain": ("--compile", "inductor", "--variant", "plain"),
    "eager": ("--compile", "eager"),
}
ROWS, CONTEXT = 4, 2048  # of each GPU, and the tokens of a row
LOSSES = ("--size", "small", "--compile", "mhc")
# The parts that compare losses, with their rows.
COMPARED = {"losses": ("--batch", "8"), "losses of one row": ("--batch", "1", "--context", "4096")}
PARTS = {"speed": ["speed"], "losses": [*COMPARED], "layers": ["layers"]}


def gpus_of(division: str) -> int:
    return math.prod(_parts(division).values())


def _parts(division: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (part.partition("=") for part in division.split(",") if part)}


def _rows(division: str) -> tuple[str, ...]:
    """With `tp`, a group has one long row: before 2.13, torch cannot divide the tokens of several rows."""
    joined = ROWS * _parts(division)["tp"] if "tp" in _parts(division) else 1
    return ("--batch", str(ROWS * gpus_of(division) // joined), "--context", str(CONTEXT * joined))


def _compared(part: str) -> list[str]:
    """The divisions whose losses are compared: those of one long row can divide nothing but its tokens."""
    alone = {"tp"} if part == "losses of one row" else {"ddp", "fsdp", "pp", "cp"}
    return [division for division in DIVISIONS if set(_parts(division)) <= alone]


@dataclass(frozen=True)
class Job:
    """One run of the example, or of `divided_layers` if part is `layers`. Other parts are `speed` and `COMPARED`, whose
    divisions all have the same rows.
    """

    part: str
    division: str
    mode: str
    arguments: tuple[str, ...] = field(default=(), compare=False)

    @property
    def gpus(self) -> int:
        return gpus_of(self.division)


def plan(gpus: int, size: str, layers: int | None, steps: int) -> list[Job]:
    """What to run with so many GPUs: one mode after the other, with the largest jobs first, so that they pack well."""
    fixed = ("--size", size, "--steps", str(steps), *(("--layers", str(layers)) if layers else ()))
    jobs = [
        Job("speed", division, mode, (*fixed, *MODES[mode], *_rows(division)))
        for mode in MODES
        for division in DIVISIONS
    ]
    jobs += [
        Job(part, division, "mhc", (*LOSSES, *rows, "--steps", str(steps)))
        for part, rows in COMPARED.items()
        for division in _compared(part)
    ]
    jobs += [Job("layers", "fsdp=2", mode, MODES[mode]) for mode in MODES]
    order = [*MODES]
    return sorted(
        (job for job in jobs if job.gpus <= gpus),
        key=lambda job: (job.part != "speed", order.index(job.mode), -job.gpus),
    )


class Running:
    """A job that has begun, on GPUs of its own."""

    def __init__(self, job: Job, devices: Sequence[int], example: Path, limit: float) -> None:
        self.job, self.devices, self.end = job, devices, time.monotonic() + limit
        self.folder = tempfile.TemporaryDirectory(prefix="scaling-")
        self.log = (Path(self.folder.name) / "log").open("w+", encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.gpus)]
        program = ["-m", "benchmarks.divided_layers"] if job.part == "layers" else [str(example)]
        arguments = [*job.arguments, "--out", self.folder.name, *(["--parallel", job.division] if job.division else [])]
        self.process = subprocess.Popen(
            [sys.executable, *(launcher if job.division else []), *program, *arguments],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def result(self) -> dict[str, Any] | None:
        """What came of it; None while it runs."""
        late = False
        if self.process.poll() is None:
            if time.monotonic() < self.end:
                return None
            late = True
            self.process.terminate()  # torchrun ends its workers, too
            self.process.wait(60)
        self.log.seek(0)
        said = self.log.read()
        self.log.close()
        folder = Path(self.folder.name)
        about: dict[str, Any] = asdict(self.job) | {"gpus": self.job.gpus}
        if self.process.returncode == 0:
            about |= {"status": "measured"} | json.loads((folder / "summary.json").read_text(encoding="utf-8"))
            if (losses := folder / "losses.csv").exists():
                lines = losses.read_text(encoding="utf-8").splitlines()[1:]
                about["losses"] = [float(line.split(",")[1]) for line in lines]
        else:
            status = "out of time" if late else "out of memory" if "OutOfMemoryError" in said else "failed"
            about |= {"status": status, "said": _cause(said)}
        self.folder.cleanup()
        return about


def _cause(said: str) -> str:
    """The end of what a job printed, without what torchrun says about processes that have ended."""
    torchrun = r"^(?:E\d{4} .*torch/distributed/elastic/|W\d{4} .*torch/distributed/elastic/multiprocessing/api)"
    return re.split(torchrun, said, maxsplit=1, flags=re.MULTILINE)[0].rstrip()[-3000:]


def run(
    jobs: Iterable[Job], devices: Sequence[int], example: Path, budget: float, limit: float
) -> Iterator[dict[str, Any]]:
    """The results of all jobs that begin within the budget, in seconds, as they come; what runs then is stopped."""
    end = time.monotonic() + budget
    waiting, running, free = list(jobs), list[Running](), list(devices)
    while waiting or running:
        if time.monotonic() > end:
            waiting.clear()
        for job in list(waiting):
            if job.gpus <= len(free):
                waiting.remove(job)
                taken, free = free[: job.gpus], free[job.gpus :]
                running.append(Running(job, taken, example, min(limit, end - time.monotonic())))
        time.sleep(0.2)
        for one in list(running):
            if (result := one.result()) is not None:
                running.remove(one)
                free = sorted([*free, *one.devices])
                yield result


def _rate(result: dict[str, Any] | None) -> float | None:
    if not result or result["status"] != "measured" or "tokens_per_second" not in result:
        return None
    rate: float = result["tokens_per_second"] / result["gpus"]
    return rate


Measured = dict[tuple[str, str, str], dict[str, Any]]


def table(content: dict[str, Any]) -> str:
    """Tokens a second and GPU, the share of a step that hyper-connections take, memory, and losses."""
    measured = {(r["part"], r["division"], r["mode"]): r for r in content["results"]}
    divisions = [division for division in DIVISIONS if any(key[:2] == ("speed", division) for key in measured)]
    speeds = _speeds(measured, divisions) if divisions else []
    return "\n".join([*speeds, *_losses(measured), *_layers(measured)])


def _speeds(measured: Measured, divisions: list[str]) -> list[str]:
    shares = ("share of hyper-connections, Inductor", "share, mhc")
    lines = [_line("division", "GPUs", "eager", "Inductor", "mhc", "plain residual", *shares), "|---|" + 7 * "---:|"]
    for division in divisions:
        rates = [_cell(measured, division, mode, _tokens) for mode in ("eager", "inductor", "mhc", "plain")]
        shown = [_share(measured, division, mode) for mode in ("inductor", "mhc")]
        lines.append(_line(_name(division), str(gpus_of(division)), *rates, *shown))
    lines += ["", _line("division", "GiB a GPU: eager", "Inductor", "mhc"), "|---|" + 3 * "---:|"]
    for division in divisions:
        lines.append(
            _line(_name(division), *(_cell(measured, division, m, _gibibytes) for m in ("eager", "inductor", "mhc")))
        )
    return lines


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _name(division: str) -> str:
    return division.replace(",", " x ") or "one process"


def _tokens(result: dict[str, Any]) -> str:
    return f"{_rate(result):,.0f}"


def _gibibytes(result: dict[str, Any]) -> str:
    return f"{result['peak_bytes_of_a_device'] / 2**30:.1f}"


def _cell(measured: Measured, division: str, mode: str, show: Callable[[dict[str, Any]], str]) -> str:
    result = measured.get(("speed", division, mode))
    if result is None:
        return "-"
    return show(result) if result["status"] == "measured" else result["status"]


def _share(measured: Measured, division: str, mode: str) -> str:
    with_it, without = (_rate(measured.get(("speed", division, which))) for which in (mode, "plain"))
    return f"{1 - with_it / without:.0%}" if with_it and without else "-"


def _losses(measured: Measured) -> Iterator[str]:
    alone = {part: measured.get((part, "", "mhc"), {}) for part in COMPARED}
    parts = [part for part, result in alone.items() if result.get("status") == "measured"]
    if parts:
        yield from ("", "| division | largest difference of a loss to one GPU's |", "|---|---:|")
    for part in parts:
        for division in _compared(part):
            if division and (result := measured.get((part, division, "mhc"))) is not None:
                pairs = zip(result.get("losses", []), alone[part]["losses"], strict=False)
                apart = max((abs(ours - other) / other for ours, other in pairs), default=None)
                yield _line(_name(division), result["status"] if apart is None else f"{apart:.1e}")


def _layers(measured: Measured) -> Iterator[str]:
    """A step of the decoder layers, divided by their number. Wrong results have no figures."""
    results = {mode: result for (part, _, mode), result in measured.items() if part == "layers"}
    if not results:
        return
    columns = ("a step, ms a layer", "kernels of mhc", "communication", "other kernels", "GiB above parameters")
    yield from ("", _line("decoder layers", "computed again", *columns), "|---|---|" + 5 * "---:|")
    eager = results.get("eager", {}).get("measured", [{}])[0].get("errors")
    for mode, result in results.items():
        if result["status"] != "measured":
            yield _line(mode, result["status"], *(5 * ["-"]))
            continue
        for way in result["measured"]:
            # Plain layers are another program: eager code has no errors to compare them with.
            wrong = complaints(way["errors"], eager, torch.bfloat16) if eager and mode != "plain" else []
            cells = [wrong[0], *(4 * ["-"])] if wrong else _cells(way, result["layers"])
            yield _line(mode, way["recomputed"], *cells)


def _cells(way: dict[str, Any], layers: int) -> list[str]:
    spent = [way["step_ms"], *(way["kernels_ms"][kind] for kind in ("mhc", "communication", "others"))]
    return [*(f"{one / layers:.2f}" for one in spent), f"{(way['peak_bytes'] - way['resident_bytes']) / 2**30:.2f}"]


def draw(path: Path, folder: Path) -> Path:
    """Bars of tokens a second and GPU, for each division."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    from benchmarks.plots import NAMES

    content = report.load(path, "division")
    names = {mode: NAMES.get(mode, ("plain residual", "#1b9e77")) for mode in ("eager", "inductor", "mhc", "plain")}
    measured = {(r["division"], r["mode"]): _rate(r) for r in content["results"] if r["part"] == "speed"}
    divisions = [division for division in DIVISIONS if any(key[0] == division for key in measured)]
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    for place, (mode, (label, colour)) in enumerate(names.items()):
        at = [index + 0.2 * (place - 1.5) for index in range(len(divisions))]
        axes.bar(at, [measured.get((d, mode)) or 0.0 for d in divisions], 0.18, label=label, color=colour)
    labels = [f"{_name(d)}\n{gpus_of(d)} GPUs" for d in divisions]
    axes.set_xticks(range(len(divisions)), labels)
    axes.set(ylabel="tokens a second and GPU", title=f"{content['hardware']}, torch {content['torch']}")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{path.stem}.png"
    figure.savefig(file, dpi=130, bbox_inches="tight", facecolor="white")
    pyplot.close(figure)
    return file


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0])
    top.add_argument("command", nargs="?", choices=("run", "table", "plot"), default="run")
    top.add_argument("file", nargs="?", type=Path, help="of results, to print or to draw")
    top.add_argument("--size", default="wide", help="of the example's model (default %(default)s)")
    top.add_argument("--layers", type=int, help="how many blocks, in place of the size's")
    top.add_argument("--steps", type=int, default=12, help="of each run (default %(default)s)")
    top.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="(default: all)")
    top.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES), help="(default: all)")
    top.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="(default: all)")
    top.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop after so many")
    top.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of one run (default %(default)s)")
    top.add_argument("--continue", dest="before", type=Path, metavar="FILE", help="results that need no second run")
    top.add_argument("--commit", help="what is measured, where the sources are no git checkout")
    top.add_argument("--out", type=Path, default=Path("results/scaling.json"), help="(default %(default)s)")
    return top


def measure(options: argparse.Namespace) -> int:
    devices = range(options.gpus)
    if not devices:
        raise SystemExit("--gpus: there is no GPU here")
    about = report.environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    about["commit"] = about["commit"] or options.commit
    results = report.continued(options.before, about) if options.before else []
    known = {(r["part"], r["division"], r["mode"]) for r in results}
    wanted = [part for option in options.parts for part in PARTS[option]]
    jobs = [
        job
        for job in plan(options.gpus, options.size, options.layers, options.steps)
        if job.mode in options.modes and job.part in wanted and (job.part, job.division, job.mode) not in known
    ]
    example = ROOT / "examples" / "train_lm.py"
    for result in run(jobs, devices, example, options.budget, options.limit):
        results.append(result)
        report.save(options.out, about, 0.0, results)
        rate = _rate(result)
        told = f"{rate:,.0f} tokens/s a GPU" if rate else result["status"]
        print(f"{result['part']} {result['division'] or 'one process'} {result['mode']}: {told}", flush=True)
    print(table({"results": results}))
    return int(any(result["status"] == "failed" for result in results))


def main() -> int:
    options = parser().parse_args()
    if options.command == "run":
        return measure(options)
    if options.file is None:
        raise SystemExit(f"{options.command}: which file of results?")
    if options.command == "table":
        print(table(report.load(options.file, "division")))
    else:
        print(draw(options.file, options.file.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
