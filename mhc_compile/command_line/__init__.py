"""The command line: `python -m mhc_compile COMMAND`. docs/command_line.md shows each command with its output.

A command imports what it needs when it runs: `--help` waits neither for Dynamo nor for the passes.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from mhc_compile import __version__
from mhc_compile.command_line import commands
from mhc_compile.command_line.programs import UsageError, input_option

__all__ = ["UsageError", "main"]

_PROG = "python -m mhc_compile"
_EXIT_CODES = """\
exit codes:
  0  the command did what it was asked to do
  1  explain --strict: a site was declined, cut or not compiled, or a pass failed
     verify: mhc is less accurate than eager, or a pass failed
  2  wrong usage: a wrong option, a module that cannot be imported, a factory or a model that fails"""

_TOP = f"""\
examples:
  {_PROG} env                                       what a bug report needs
  {_PROG} explain models.py:make                    what would be rewritten, and why not the rest
  {_PROG} explain my_package.models:make --json     the same for programs
  {_PROG} verify models.py:make                     compare eager, Inductor and mhc with float64
  {_PROG} ops expand_combine                        what an operator computes

{_EXIT_CODES}

`{_PROG} COMMAND --help` has the options of a command and more examples."""

_FACTORY = """\
PROGRAM is module:factory or path/to/file.py:factory. The factory is called without arguments, after
torch.manual_seed(0). It returns (model, args) or (model, args, kwargs). With --input it returns the model alone.
In place of a factory PROGRAM may name a model, or a tuple as above.

  # models.py
  def make():
      model = Transformer(layers=2)
      return model, (), {"input_ids": torch.zeros(2, 16, dtype=torch.int64)}
"""

_EXPLAIN = f"""\
Run the model once through Dynamo, and report its hyper-connections: which operators they would become, which are left
as they are and why, where Dynamo cuts a graph, and what is fused. Nothing is compiled.

{_FACTORY}"""

_EXPLAIN_MORE = f"""\
examples:
  {_PROG} explain models.py:make
  {_PROG} explain models.py:make -v                 every site with its line
  {_PROG} explain models.py:Transformer --input 2x16:int64
  {_PROG} explain models.py:make --strict           for continuous integration
  {_PROG} explain models.py:make --html report.html  a page about the model
  {_PROG} explain models.py:make --json             the layout is in docs/command_line.md

{_EXIT_CODES}"""

_VERIFY = f"""\
Run the model eagerly, compiled by Inductor and compiled by mhc, and compare outputs and all gradients with a float64
evaluation. A first compilation may take minutes. The float64 copy of the model needs memory.

{_FACTORY}"""

_VERIFY_MORE = f"""\
examples:
  {_PROG} verify models.py:make
  {_PROG} verify models.py:make --no-inductor       sooner: plain Inductor only shows what is usual
  {_PROG} verify models.py:make --no-grad           outputs alone

{_EXIT_CODES}"""

_ENV_MORE = f"""\
examples:
  {_PROG} env
  {_PROG} env --json > environment.json

{_EXIT_CODES}"""

_OPS_MORE = f"""\
examples:
  {_PROG} ops
  {_PROG} ops generate_mix_and_aggregate

{_EXIT_CODES}"""

_BENCH = """\
Time one small model on this machine: eager, compiled by Inductor, and compiled by mhc. The model is a chain of
hyper-connections around linear layers. It says nothing about other models or other sizes; measure your own model for
that. Compilation is not timed, and results are not compared: `verify` does that."""

_BENCH_MORE = f"""\
examples:
  {_PROG} bench
  {_PROG} bench --no-inductor                       sooner: Inductor compiles longest
  {_PROG} bench --device cuda --tokens 8192 --width 4096

{_EXIT_CODES}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. arguments are those of the process if none are given.

    Raises SystemExit where argparse does: after `--help` and `--version`, and with code 2 for a wrong option.
    """
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:  # with the usage of the command, where argparse shows that of all commands
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = options.run(options)
    except UsageError as error:
        if options.verbose and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        more = " (-v shows the traceback)" if error.__cause__ is not None and not options.verbose else ""
        sys.stderr.write(f"{_PROG} {options.command}: {error}{more}\n")
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog=_PROG,
        description="Hyper-connections in eager PyTorch models, found and made fast.",
        epilog=_TOP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"mhc_compile {__version__}")
    several = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    explain = _command(several, "explain", "report the hyper-connections of a model", _EXPLAIN, _EXPLAIN_MORE)
    _take_program(explain)
    explain.add_argument("--json", action="store_true", help="print JSON; docs/command_line.md has the layout")
    explain.add_argument("--html", metavar="FILE", help="write a page about the model to FILE; it needs jinja2")
    explain.add_argument("--strict", action="store_true", help="exit with 1 if anything is declined, cut or fails")
    explain.add_argument("-v", "--verbose", action="store_true", help="print every site; the traceback of a failure")

    verify = _command(several, "verify", "compare eager, Inductor and mhc with float64", _VERIFY, _VERIFY_MORE)
    _take_program(verify)
    verify.add_argument("--no-inductor", dest="inductor", action="store_false", help="leave out plain Inductor")

    env = _command(several, "env", "print what a bug report needs", "Print what a bug report needs.", _ENV_MORE)
    env.add_argument("--json", action="store_true", help="print JSON; docs/command_line.md has the layout")

    about = "List the registered operators with equation and schema, or print the docstring of one."
    ops = _command(several, "ops", "list the operators, or explain one", about, _OPS_MORE)
    ops.add_argument("name", nargs="?", metavar="NAME", help="an operator, such as expand_combine")

    bench = _command(several, "bench", "time one small model: eager, Inductor, mhc", _BENCH, _BENCH_MORE)
    bench.add_argument(
        "--device", choices=("cpu", "cuda"), help="the default is cuda if torch sees a GPU, otherwise cpu"
    )
    for size, meaning in (("layers", "hyper-connections"), ("tokens", "tokens"), ("width", "C, the width of a stream")):
        bench.add_argument(f"--{size}", type=_positive, metavar="N", help=f"{meaning}; the default suits the device")
    bench.add_argument("--no-inductor", dest="inductor", action="store_false", help="leave out plain Inductor")

    for command in (verify, env, ops, bench):
        command.add_argument("-v", "--verbose", action="store_true", help="print the traceback of a failure")
    return top


def _command(several: Any, name: str, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    command: argparse.ArgumentParser = several.add_parser(
        name, help=summary, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False
    )
    command.set_defaults(run=getattr(commands, name), parser=command)
    return command


def _take_program(command: argparse.ArgumentParser) -> None:
    command.add_argument("program", metavar="PROGRAM", help="module:factory or path/to/file.py:factory")
    command.add_argument(
        "--input",
        dest="inputs",
        action="append",
        default=[],
        type=input_option,
        metavar="SHAPE[:DTYPE]",
        help="an argument of the model, such as 2x16:int64; once for each argument. Floats are normally distributed, "
        "integers are 0 or 1. The default dtype is float32",
    )
    command.add_argument("--no-grad", dest="grad", action="store_false", help="run the model without gradients")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number above 0")
    return int(text)
