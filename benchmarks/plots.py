"""Pictures of a results file, for someone who would rather look than read: one question each, answered at the bars."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report, units

Results = Sequence[dict[str, Any]]

# Ours in colour, the rest of PyTorch in grey, other libraries in blues and greens.
NAMES = {
    "mhc": ('backend="mhc"', "#c8102e"),
    "mhc-ops": ("mhc operators, called", "#f08a5d"),
    "inductor": ("Inductor", "#555555"),
    "eager": ("eager", "#a8a8a8"),
    "liger": ("Liger-Kernel", "#1b9e77"),
    "transformer_engine": ("TransformerEngine", "#4c72b0"),
    "tile_kernels": ("TileKernels", "#17becf"),
}
MODES = {"forward": "forward", "step": "forward and backward"}


@dataclass(frozen=True)
class Bar:
    """One bar: what stands left of it, its parts from left to right with their colours, what stands right of it."""

    label: str
    parts: tuple[tuple[float, str], ...]
    text: str


def draw(path: Path, folder: Path) -> list[Path]:
    """Draw everything that a results file has numbers for, as PNG files in `folder`; returns them."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    content = report.load(path)
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{content['hardware']}, copy {content['copy_gb_s']:,.0f} GB/s, torch {content['torch']}, "
    about += f"{content['date'][:10]}"
    if content["commit"]:
        about += f", commit {content['commit'][:7]}"
    written = []
    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        for name, picture in PICTURES.items():
            figure = picture(pyplot, content["results"], about)
            if figure is not None:
                written.append(folder / f"{path.stem}-{name}.png")
                figure.savefig(written[-1], dpi=130, bbox_inches="tight", facecolor="white")
                pyplot.close(figure)
    return written


def _head(figure: Any, title: str, about: str) -> None:
    """The title and, smaller, what the numbers belong to, above everything else."""
    figure.tight_layout()
    height = figure.get_size_inches()[1]
    figure.text(0.01, 1 + 0.42 / height, title, fontsize=13, fontweight="bold", ha="left", va="bottom")
    figure.text(0.01, 1 + 0.12 / height, about, fontsize=8.5, color="#555555", ha="left", va="bottom")


def _shape(results: Results) -> str:
    main = report.main_shape(results)
    return f"{main['tokens']:,} tokens, C = {main['width']:,}, n = {main['streams']}"


def _order(results: Results) -> list[dict[str, Any]]:
    listed = list(NAMES)
    return sorted(results, key=lambda r: listed.index(r["provider"]))


def _bars(axis: Any, bars: Sequence[Bar], floor: float | None = None) -> None:
    """Horizontal bars with their numbers beside them, and a line where the least possible is."""
    longest = max(sum(width for width, _ in bar.parts) for bar in bars)
    for at, bar in enumerate(bars):
        left = 0.0
        for width, colour in bar.parts:
            axis.barh(at, width, left=left, color=colour, height=0.68)
            left += width
        axis.text(left + 0.012 * longest, at, bar.text, va="center", fontsize=9.5)
    axis.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 1.45 * longest)
    axis.tick_params(axis="y", length=0)
    if floor is not None:
        axis.axvline(floor, color="black", linewidth=1, linestyle=(0, (4, 3)))


def _rows(pyplot: Any, panels: int, bars: int, width: float = 6.6) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(1, panels, figsize=(width * panels, 0.42 * bars + 0.9), squeeze=False)
    return figure, axes[0]


def _both_modes(
    pyplot: Any, results: Results, key: str, bar: Callable[[dict[str, Any], str], Bar],
    floor: Callable[[dict[str, Any], str], float], *, label: str, title: str, about: str,
) -> Any:  # fmt: skip
    """One panel for forward and one for forward and backward, of the main shape; None without any number."""
    found = {mode: _order(report.of_main_shape(results, f"{mode}_{key}")) for mode in MODES}
    found = {mode: rows for mode, rows in found.items() if rows}
    if not found:
        return None
    figure, axes = _rows(pyplot, len(found), max(map(len, found.values())))
    for axis, (mode, rows) in zip(axes, found.items(), strict=True):
        _bars(axis, [bar(r, mode) for r in rows], floor(rows[0], mode))
        axis.set_title(MODES[mode], loc="left", fontsize=11)
        axis.set_xlabel(label)
    _head(figure, f"{title} ({_shape(results)})", about)
    return figure


def _time(pyplot: Any, results: Results, about: str) -> Any:
    def bar(r: dict[str, Any], mode: str) -> Bar:
        name, colour = NAMES[r["provider"]]
        time, least = r[f"{mode}_ms"]["median"] / r["case"]["depth"], floor(r, mode)
        return Bar(name, ((time, colour),), f"{time:.3g} ms, {time / least:.1f} x the least")

    def floor(r: dict[str, Any], mode: str) -> float:
        return float(r[f"{mode}_floor_ms"] / r["case"]["depth"])

    label = "ms a sublayer; dashed: the bytes that must move, at copy speed"
    title = "Time of hyper-connections"
    return _both_modes(pyplot, results, "ms", bar, floor, label=label, title=title, about=about)


def _bytes(pyplot: Any, results: Results, about: str) -> Any:
    def bar(r: dict[str, Any], mode: str) -> Bar:
        name, colour = NAMES[r["provider"]]
        count = r[f"{mode}_units"]
        return Bar(name, ((count, colour),), f"{count:.0f} rows, {count / floor(r, mode):.1f} x the least")

    def floor(r: dict[str, Any], mode: str) -> float:
        return float(units.floor(mode, r["case"]["streams"]))

    label = "rows of C numbers moved for each token, a sublayer; dashed: the least possible"
    title = "Memory traffic of hyper-connections, by count"
    return _both_modes(pyplot, results, "units", bar, floor, label=label, title=title, about=about)


def _lines(axis: Any, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Lines over sizes, each named at its right end; names that would meet are moved apart."""
    sizes = sorted({size for points in lines.values() for size, _ in points})
    for provider, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=NAMES[provider][1])
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=0 if len(sizes) < 5 else 45)
    axis.minorticks_off()
    low, high = axis.get_ylim()
    marks = [m * 10**e for e in range(-4, 7) for m in (1, 2, 5) if low <= m * 10**e <= high]
    axis.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axis.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axis.set_axisbelow(True)
    step = (high / low) ** 0.07
    above = 0.0
    for provider, points in sorted(lines.items(), key=lambda line: line[1][-1][1]):
        value = points[-1][1]
        above = max(value, above * step)
        name, colour = NAMES[provider]
        number = f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
        axis.text(
            1.03, above, f"{name} {number}", transform=axis.get_yaxis_transform(), color=colour, fontsize=9, va="center"
        )


def _sweeps(pyplot: Any, results: Results, about: str) -> Any:
    titles = {"tokens": "tokens", "width": "C, the width of a stream", "streams": "n, the number of streams"}
    panels = {}
    for mode in MODES:
        for by in titles:
            lines = report.series(results, by, report.over_floor(mode))
            # A single size is no line: it is in the picture of times.
            if any(len(points) > 1 for points in lines.values()):
                panels[mode, by] = {who: points for who, points in lines.items() if len(points) > 1}
    if not panels:
        return None
    columns, rows = [by for by in titles if any(by == b for _, b in panels)], list(dict.fromkeys(m for m, _ in panels))
    figure, axes = pyplot.subplots(
        len(rows), len(columns), figsize=(5.6 * len(columns), 3.6 * len(rows)), squeeze=False
    )
    for row, mode in zip(axes, rows, strict=True):
        for axis, by in zip(row, columns, strict=True):
            if (mode, by) not in panels:
                axis.set_visible(False)
                continue
            _lines(axis, panels[mode, by])
            axis.set_title(MODES[mode], loc="left", fontsize=11)
            axis.set_xlabel(titles[by])
            axis.set_ylabel("time over the least possible")
    _head(figure, f"How far from the memory roofline, around {_shape(results)}; lower is better", about)
    return figure


def _decode(pyplot: Any, results: Results, about: str) -> Any:
    lines = report.series(
        results, "tokens", lambda r: 1000 * r["graph_ms"]["median"] / r["case"]["depth"] if "graph_ms" in r else None
    )
    if not lines:
        return None
    figure, axes = pyplot.subplots(1, 1, figsize=(6.6, 4.2))
    _lines(axes, lines)
    axes.set_xlabel("tokens")
    axes.set_ylabel("microseconds a sublayer")
    main = report.main_shape(results)
    _head(figure, f"Decoding in a CUDA graph, forward (C = {main['width']:,}, n = {main['streams']})", about)
    return figure


def _memory(pyplot: Any, results: Results, about: str) -> Any:
    rows = _order(report.of_main_shape(results, "peak_units"))
    rows += _order([r for r in report.good(results, "peak_units") if r["case"]["name"] == "long"])
    if not rows:
        return None
    bars = []
    for r in rows:
        name, colour = NAMES[r["provider"]]
        case = r["case"]
        options = "".join(f", {key.removeprefix('mhc.')}={value}" for key, value in case["options"].items())
        more = f", {case['depth']} sublayers, {case['tokens']:,} tokens{options}"
        label = name + (more if case["name"] == "long" else "")
        text = f"{r['peak_units']:.1f} rows, {r['peak_bytes'] / 2**30:.2f} GiB in all"
        bars.append(Bar(label, ((r["peak_units"], colour),), text))
    figure, (axis,) = _rows(pyplot, 1, len(bars), 9.0)
    _bars(axis, bars)
    axis.set_xlabel("peak of a training step above its start: rows of C numbers for each token, a sublayer")
    _head(figure, f"Memory of hyper-connections ({_shape(results)})", about)
    return figure


def _first_step(pyplot: Any, results: Results, about: str) -> Any:
    found = _order(report.good(results, "first_step_seconds"))
    if found:
        groups: dict[str, list[Bar]] = {}
        for r in found:
            name, colour = NAMES[r["provider"]]
            case, seconds = r["case"], r["first_step_seconds"]
            what = {"block": "a DeepSeek-V4 layer", "model": f"{case['depth'] // 2} DeepSeek-V4 layers"}
            group = what.get(case["name"], f"chain of {case['depth']}")
            text = f"{seconds['cold']:.1f} s, then {seconds['warm']:.1f} s"
            groups.setdefault(group, []).append(Bar(f"{group}, {name}", ((seconds["cold"], colour),), text))
        bars = [bar for group in groups.values() for bar in group]
        label = "seconds in a fresh process, with empty caches; then with what the first one left in them"
    else:
        # The operators have nothing left to compile after the backend, which runs before them.
        alone = [r for r in report.of_main_shape(results, "first_call_seconds") if r["provider"] != "mhc-ops"]
        bars = []
        for r in _order(alone):
            name, colour = NAMES[r["provider"]]
            bars.append(Bar(name, ((r["first_call_seconds"], colour),), f"{r['first_call_seconds']:.1f} s"))
        label = "seconds, one after the other in one process"
    if not bars:
        return None
    figure, (axis,) = _rows(pyplot, 1, len(bars), 9.0)
    _bars(axis, bars)
    axis.set_xlabel(label)
    _head(figure, "Time to the end of a first training step", about)
    return figure


def _share(pyplot: Any, results: Results, about: str) -> Any:
    found = report.shares(results)
    if not found:
        return None
    bars = []
    for provider in [name for name in NAMES if name in found]:
        block, plain = found[provider]
        name, colour = NAMES[provider]
        text = f"{block:.3g} ms, {1 - plain / block:.1%} of it hyper-connections"
        bars.append(Bar(name, ((min(plain, block), "#d9d9d9"), (max(block - plain, 0.0), colour)), text))
    figure, (axis,) = _rows(pyplot, 1, len(bars), 9.0)
    _bars(axis, bars)
    axis.set_xlabel("ms a training step; grey: the same layer with plain residuals")
    case = next(r["case"] for r in report.good(results) if r["case"]["name"] == "block")
    size = f"{case['tokens']:,} tokens, C = {case['width']:,}"
    _head(figure, f"Hyper-connections in a DeepSeek-V4 decoder layer ({size})", about)
    return figure


PICTURES: dict[str, Callable[[Any, Results, str], Any]] = {
    "time": _time,
    "time_over_floor": _sweeps,
    "decode": _decode,
    "bytes": _bytes,
    "memory": _memory,
    "first_step": _first_step,
    "share": _share,
}
