"""What each command does, given its options. Every function returns the exit code."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mhc_compile import compat
from mhc_compile.arguments import check_model
from mhc_compile.command_line.programs import Program, UsageError, load, users_code
from mhc_compile.encoding import in_one_line
from mhc_compile.progress import progress, say

if TYPE_CHECKING:
    from mhc_compile.passes.report import Report

# The version of what `explain --json` and `env --json` print. A change that takes something away raises it.
FORMAT = 1
# The fields of `Report` that `explain` fills.
_FIELDS = (
    "sites",
    "called",
    "cut",
    "fusions",
    "fused",
    "excerpts",
    "advice",
    "graphs",
    "functions",
    "seconds",
    "errors",
)


def explain(options: argparse.Namespace) -> int:
    """Print `mhc_compile.explain`'s report, and write the page about it if one is wanted."""
    with _stdout_for_json(options.json):
        program = _loaded(options)
        with _running(options), torch.set_grad_enabled(options.grad):
            report = _report(program)
    if options.html is not None:
        _write_page(report, options.html)
    if options.json:
        told = report.as_dict()
        say(
            json.dumps(
                {"format": FORMAT, "program": options.program} | {name: told[name] for name in _FIELDS}, indent=1
            )
        )
    else:
        from mhc_compile.passes.report import ALL_LINES

        say(report.details() if options.verbose else str(report).replace(ALL_LINES, "add -v"))
    unknown = [site for site in report.unknown if site in report.torn]
    counts = {
        "declined": len(report.declined),
        "cut or not compiled": len(report.torn) - len(unknown),
        f"function{'s' if len(unknown) > 1 else ''} not looked at": len(unknown),
        "errors": len(report.errors),
    }
    if options.strict and any(counts.values()):
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        sys.stderr.write(f"explain --strict: {found}\n")
        return 1
    return 0


def _report(program: Program) -> Report:
    import mhc_compile

    check_model(program.model)  # a class that is called again would fail in other words
    try:
        with compat.without_fake_tracebacks():
            return mhc_compile.explain(program.model, *program.args, **program.kwargs)
    except Exception:
        # A model that fails without Dynamo as well says so in fewer words.
        program.model(*program.args, **program.kwargs)
        raise


def _write_page(report: Report, path: str) -> None:
    try:
        Path(path).write_text(report.html(), encoding="utf-8")
    except ImportError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"--html {path} failed with {in_one_line(error)}; expected a file that can be written"
        ) from error


def verify(options: argparse.Namespace) -> int:
    """Run `mhc_compile.verify`, which prints what it runs, and its table."""
    import mhc_compile

    program = _loaded(options)
    last = ["verify"]

    def tell(line: str) -> None:
        last[0] = line.removesuffix(" ...")
        say(line.replace("inductor=False", "--no-inductor"))

    ours: dict[str, Any] = {"grad": options.grad, "inductor": options.inductor, "raises": False, "say": tell}
    with _running(options), progress(lambda: last[0]):
        found = mhc_compile.verify(program.model, *program.args, **ours, **program.kwargs)  # type: ignore[arg-type]
    return 0 if found.ok else 1


def env(options: argparse.Namespace) -> int:
    """Print what a bug report needs."""
    from mhc_compile.command_line import environment

    with progress(lambda: "env: looks at compilers and GPUs"):
        found = environment.environment()
    say(json.dumps({"format": FORMAT} | found, indent=1) if options.json else environment.table(found))
    return 0


def ops(options: argparse.Namespace) -> int:
    """List the operators, or print the docstring of one."""
    import mhc_compile
    from mhc_compile import generated_pages

    names = generated_pages.registered()
    if options.name is None:
        for name in names:
            say(f"{name}\n  {generated_pages.equation(name)}\n  {_schema(name)}")
        say("`ops NAME` prints the docstring of an operator.")
        return 0
    name = options.name.removeprefix("mhc::")
    if name not in names:
        raise UsageError(f"got {options.name!r}; expected one of {', '.join(names)}")
    say(_schema(name))
    documented = getattr(mhc_compile.ops, name, None)
    say("\n" + (inspect.getdoc(documented) if documented else generated_pages.equation(name) + ".") + "\n")  # type: ignore[operator]
    if f"{name}_backward" in names:
        say(f"Its gradient: {_schema(f'{name}_backward')}")
    return 0


def bench(options: argparse.Namespace) -> int:
    """Time one small model."""
    from mhc_compile.command_line import measuring

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("got --device cuda, and torch sees no GPU; expected --device cpu")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = measuring.Sizes.of(device, layers=options.layers, tokens=options.tokens, width=options.width)
    with users_code("bench", "a device and sizes that the model fits on, and a compiler"):
        measuring.run(sizes, device, options.inductor)
    return 0


def _schema(name: str) -> str:
    """With floats as Python writes them: 1e-06, where torch has all digits."""
    from mhc_compile import generated_pages

    return re.sub(r"\d\.\d{9,}e-\d+", lambda match: repr(float(match[0])), str(generated_pages.schema(name)))


@contextlib.contextmanager
def _stdout_for_json(wanted: bool) -> Iterator[None]:
    """Send what the user's code and its child processes print to stderr, if stdout is JSON."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    stdout, stderr = 1, 2  # as every process has them, whatever `sys.stdout` is
    kept = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, stdout)
        os.close(kept)


def _loaded(options: argparse.Namespace) -> Program:
    with progress(lambda: f"{options.command}: loads {options.program}"):
        return load(options.program, options.inputs)


def _running(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    return users_code(f"{options.command} of {options.program}", "a model that runs with its arguments")
