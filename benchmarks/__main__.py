"""The command line: `python -m benchmarks [run]` measures, `table FILES` prints and `plot FILES` draws what was."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import cases, plots, report
from benchmarks.measure import Meter
from benchmarks.plan import PARTS, Plan, plan
from benchmarks.providers import PROVIDERS, installed
from benchmarks.runner import Budget, Result, Runner, compile_here, first_step_here, run_plan, say

COMMANDS = ("run", "table", "plot", "first-step", "compile")
# Inductor's programs that are compiled side by side: each holds up to 20 GiB of a device's memory while it does.
PROCESSES = 6


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=cases.__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure (the default command)")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    run.add_argument("--quick", action="store_true", help="the main shape and a few around it, in minutes")
    run.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="stop cleanly after so many")
    run.add_argument("--continue", dest="before", type=Path, metavar="FILE", help="results that need no second run")
    run.add_argument(
        "--parts", nargs="+", choices=tuple(PARTS), default=[], help="only these, in the order of the plan"
    )
    run.add_argument("--providers", nargs="+", choices=tuple(PROVIDERS), default=[], help="only these")
    run.add_argument("--tokens", nargs="+", type=int, default=[], help="only cases of these token counts")
    run.add_argument("--width", nargs="+", type=int, default=[], help="only cases of these C")
    run.add_argument("--streams", nargs="+", type=int, default=[], help="only cases of these n")
    run.add_argument("--processes", type=int, help="compile Inductor's programs in so many processes beforehand")
    run.add_argument("--commit", help="what is measured, where the sources are no git checkout")
    run.add_argument("--no-first-step", action="store_true", help="no fresh processes, so no compile times")
    run.add_argument("--out", type=Path, help="the JSON file; results/DEVICE-DATE.json if not given")
    tables = commands.add_parser("table", help="print the tables of results files")
    plots = commands.add_parser("plot", help="draw each results file (needs matplotlib: the [bench] extra)")
    for command in (tables, plots):
        command.add_argument("files", nargs="+", type=Path)
    plots.add_argument("--out", type=Path, default=Path("results"), help="the folder for the plots")
    for hidden in ("first-step", "compile"):
        commands.add_parser(hidden).add_argument("request")
    return top


def chosen(options: argparse.Namespace, device: torch.device) -> Plan:
    """The part of the plan that the options ask for."""
    from mhc_compile.options import OPTIONS

    result: dict[str, list[cases.Case]] = {}
    for part, listed in plan(device, quick=options.quick, recompute="mhc.recompute" in OPTIONS).items():
        for case in listed:
            wanted = {"parts": part, "tokens": case.tokens, "width": case.width, "streams": case.streams}
            modes = tuple(mode for mode in case.modes if mode != "first" or not options.no_first_step)
            if modes and all(not getattr(options, name) or wanted[name] in getattr(options, name) for name in wanted):
                result.setdefault(part, []).append(replace(case, modes=modes))
    return result


def run(options: argparse.Namespace) -> int:
    budget = Budget(options.budget)
    device = torch.device(options.device)
    selected = chosen(options, device)
    if not selected:
        raise SystemExit("no case of this plan is of the parts and sizes asked for")
    about = report.environment(device)
    about["commit"] = about["commit"] or options.commit
    about["complete"] = False
    about["not_installed"] = [name for name in PROVIDERS if not installed(name)]
    before = report.continued(options.before, about) if options.before else []
    name = re.sub(r"[^a-z0-9]+", "-", about["hardware"].lower()).strip("-")
    out = options.out or Path("results") / f"{name}-{about['date'][:10]}.json"
    meter = Meter(device)
    bandwidth = meter.copy_bandwidth()
    say(f"{about['hardware']}, copy {bandwidth:.0f} GB/s; torch {about['torch']}, triton {about['triton']}; to {out}")

    def keep(bandwidth: float, results: list[Result]) -> None:
        report.save(out, about, bandwidth, results)

    if about["not_installed"]:
        say(f"not installed: {', '.join(about['not_installed'])}")
    runner = Runner(device, meter, bandwidth, budget, before, keep)
    processes = options.processes if options.processes is not None else PROCESSES if device.type == "cuda" else 0
    about["complete"] = run_plan(selected, options.providers, runner, processes)
    keep(bandwidth, runner.results)
    print("\n" + report.table(report.load(out)))
    if not about["complete"]:
        say(f"not everything was measured: go on with --continue {out}")
    return 1 if any(result["status"] in ("refused", "failed") for result in runner.results) else 0


def main(arguments: Sequence[str]) -> int:
    arguments = list(arguments)
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments.insert(0, "run")
    options = parser().parse_args(arguments)
    if options.command == "run":
        return run(options)
    if options.command == "first-step":
        print(json.dumps({"seconds": first_step_here(options.request)}))
        return 0
    if options.command == "compile":
        compile_here(options.request)
        return 0
    try:
        if options.command == "table":
            print("\n\n".join(report.table(report.load(path)) for path in options.files))
            return 0
        written = [picture for path in options.files for picture in plots.draw(path, options.out)]
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: plots need the bench extra, pip install '.[bench]'") from None
    except ValueError as error:  # of a file
        raise SystemExit(str(error)) from None
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
