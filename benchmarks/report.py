"""What the measurements look like: JSON with all that they depend on, tables, and the series that plots show."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import ROOT
from mhc_compile.command_line.environment import processor

FORMAT = 1


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def environment(device: torch.device) -> dict[str, Any]:
    """The hardware, the versions and the commit that numbers belong to."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    else:
        hardware = f"{processor()}, {torch.get_num_threads()} threads"
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware,
        "device": device.type,
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
        "commit": _git("rev-parse", "HEAD") or None,
        "changed": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def save(path: Path, about: dict[str, Any], bandwidth: float, results: list[dict[str, Any]]) -> None:
    """Write everything so far; an interrupted run leaves a whole file behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(about | {"copy_gb_s": bandwidth, "results": results}, indent=1)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def load(path: Path, needed: str = "case") -> dict[str, Any]:
    """A file that `save` wrote, whose results have what is needed; raises ValueError for anything else."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path}: not a results file of format {FORMAT}")
    if any(needed not in result for result in content.get("results", [{}])):
        raise ValueError(f"{path}: another benchmark's results, which have no {needed}")
    return content


def continued(path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of an earlier run, to go on from: all but what failed or was not there. ValueError if they belong to
    something else.
    """
    content = load(path)
    for key in ("hardware", "torch", "triton", "commit", "matmul_precision"):
        if content[key] != about[key]:
            raise ValueError(f"{path}: its {key} is {content[key]}, here it is {about[key]}")
    return [r for r in content["results"] if r["status"] not in ("failed", "unavailable")]


def _sample(value: dict[str, float] | None, by: float, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value['median'] / by:.{digits}f} ({value['p20'] / by:.{digits}f}-{value['p80'] / by:.{digits}f})"


def _row(result: dict[str, Any]) -> list[str]:
    if result["status"] != "ok":
        return [result["provider"], f"{result['status']}: {result['reason']}"]
    depth = result["case"]["depth"]

    def over_floor(mode: str) -> str:
        if f"{mode}_ms" not in result or f"{mode}_floor_ms" not in result:
            return "-"
        return f"{result[f'{mode}_ms']['median'] / result[f'{mode}_floor_ms']:.2f}"

    def one(key: str) -> str:
        return f"{result[key]:.1f}" if key in result else "-"

    first, process = result.get("first_step_seconds", {}), result.get("process_seconds", {})
    launches = result.get("forward_launches")
    return [
        result["provider"],
        _sample(result.get("forward_ms"), depth),
        over_floor("forward"),
        one("forward_units"),
        _sample(result.get("step_ms"), depth),
        over_floor("step"),
        one("step_units"),
        one("peak_units"),
        _sample(result.get("forward_host_us"), depth, 1),
        f"{launches / depth:.1f}" if launches else "-",
        result.get("graph_note") or _sample(result.get("graph_ms"), depth / 1000, 1),
        one("first_call_seconds"),
        f"{first['cold']:.1f} / {first['warm']:.1f}" if first else "-",
        f"{process['cold']:.1f} / {process['warm']:.1f}" if process else "-",
    ]


HEADER = [
    "provider", "forward ms", "x floor", "units moved", "step ms", "x floor", "units moved", "peak units", "host us",
    "launches", "in a graph us", "first call here s", "fresh process s cold / warm",
    "with its start s",
]  # fmt: skip


def programs(results: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each program with its providers' results, whatever the modes and in how many parts they were measured."""
    groups: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for result in results:
        same = json.dumps({k: v for k, v in result["case"].items() if k not in ("modes", "providers")}, sort_keys=True)
        _, rows = groups.setdefault(same, (result["case"], []))
        for row in rows:
            if row["provider"] == result["provider"] and row["status"] == result["status"]:
                row |= {key: value for key, value in result.items() if key != "case"}
                break
        else:
            rows.append(dict(result))
    return list(groups.values())


def table(content: dict[str, Any]) -> str:
    """Markdown: a table for each program; all but the first step per sublayer, medians (20th-80th percentile)."""
    lines = [
        f"{content['hardware']}; torch {content['torch']}, triton {content['triton']}; {content['date']}; "
        f"commit {content['commit']}{' with changes' if content['changed'] else ''}; "
        f"copy {content['copy_gb_s']:.0f} GB/s",
    ]
    for case, rows in programs(content["results"]):
        options = "".join(f", {key}={value}" for key, value in case["options"].items())
        lines += [
            "",
            f"{case['name']} of {case['depth']}: {case['tokens']} tokens, C = {case['width']}, "
            f"n = {case['streams']}, {case['dtype']}{options}; per sublayer",
            "",
            "| " + " | ".join(HEADER) + " |",
            "|---" * len(HEADER) + "|",
        ]
        lines += ["| " + " | ".join(_row(row)) + " |" for row in rows]
    for provider, (block, plain) in shares(content["results"]).items():
        part = f"{1 - plain / block:.1%} of a block's training step is hyper-connections"
        lines += ["", f"{provider}: {part} ({block:.2f} ms with, {plain:.2f} ms with plain residuals)"]
    return "\n".join(lines)


def good(results: Iterable[dict[str, Any]], *needed: str) -> list[dict[str, Any]]:
    """The results that have all of these."""
    return [r for r in results if r["status"] == "ok" and all(key in r for key in needed)]


def shares(results: Iterable[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """provider -> milliseconds of a block's training step, and of the same with plain residuals."""
    times = {(r["case"]["name"], r["provider"]): float(r["step_ms"]["median"]) for r in good(results, "step_ms")}
    return {who: (block, times["plain", who]) for (name, who), block in times.items()
            if name == "block" and ("plain", who) in times}  # fmt: skip


AXES = ("tokens", "width", "streams")


def main_shape(results: Iterable[dict[str, Any]]) -> dict[str, int]:
    """The chain of which most others are variations in one size, and that most providers ran; empty without a chain."""
    ran = Counter(tuple(r["case"][key] for key in AXES) for r in good(results) if r["case"]["name"] == "chain")

    def near(shape: tuple[int, ...]) -> int:
        return sum(sum(a != b for a, b in zip(shape, other, strict=True)) < 2 for other in ran)

    found = max(ran, key=lambda shape: (near(shape), ran[shape], shape), default=())
    return dict(zip(AXES, found, strict=False))


def of_main_shape(results: Sequence[dict[str, Any]], *needed: str, name: str = "chain") -> list[dict[str, Any]]:
    """The results of that chain that have all of `needed`."""
    shape = main_shape(results).items()
    return [r for r in good(results, *needed) if r["case"]["name"] == name and shape <= r["case"].items()]


def series(
    results: Sequence[dict[str, Any]], by: str, value: Callable[[dict[str, Any]], float | None]
) -> dict[str, list[tuple[int, float]]]:
    """provider -> [(size, value)] along one of `AXES`, of the chains like the main shape but for this size."""
    main = main_shape(results)
    lines: dict[str, dict[int, float]] = {}
    for r in good(results):
        case = r["case"]
        same = case["name"] == "chain" and all(case[key] == size for key, size in main.items() if key != by)
        if same and (found := value(r)) is not None:
            lines.setdefault(r["provider"], {})[case[by]] = found
    return {provider: sorted(points.items()) for provider, points in lines.items()}


def over_floor(mode: str) -> Callable[[dict[str, Any]], float | None]:
    """The time of a result as a multiple of the least possible."""
    time, floor = f"{mode}_ms", f"{mode}_floor_ms"
    return lambda r: r[time]["median"] / r[floor] if time in r and floor in r else None
