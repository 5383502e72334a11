"""Count what ranks of a job send in a training step of `examples/train_lm.py`, without other ranks and without data.

A process imitates one rank of 8 or of 64, by torch's "fake" process group. Its tensors are fake: they have shapes, and
no numbers. So the model has its real width, on any machine, and what is counted is what a real step would send.
Nothing is timed.

    python -m benchmarks.communication                        # count, print the table, write results/communication.json
    python -m benchmarks.communication table results/communication.json

Bytes are those that a rank sends if collectives go round in a ring of N ranks: of a tensor that all have in the end,
an all-gather sends (N - 1) / N, a reduce-scatter the same, and an all-reduce twice that.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.measure import ROOT
from benchmarks.report import environment
from mhc_compile import compat, passes
from mhc_compile.passes.report import Report

sys.path.append(str(ROOT / "examples"))

from language_model.model import SIZES, Config, LanguageModel  # type: ignore[import-not-found]
from language_model.parallel import Parallel, sizes_of  # type: ignore[import-not-found]

# One row of so many tokens for each rank, however the work is divided.
MODEL = SIZES["wide"]
DIVISIONS = {8: ("fsdp=8", "tp=8", "pp=8", "fsdp=4,tp=2"), 64: ("fsdp=64", "fsdp=8,tp=8", "pp=8,fsdp=8")}
COMPILED = ("eager", "mhc")
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "send")


# Each operator of a collective: its kind, and the bytes that a rank sends, of so many ranks.
Sent = Callable[[Sequence[Any], int], int]
COUNTED: dict[str, tuple[str, Sent]] = {
    "c10d::_allgather_base_": ("all-gather", lambda args, ranks: (ranks - 1) * _bytes(args[1])),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", lambda args, ranks: (ranks - 1) * _bytes(args[0])),
    "c10d::allreduce_": ("all-reduce", lambda args, ranks: 2 * (ranks - 1) * _bytes(args[0]) // ranks),
    "c10d::send": ("send", lambda args, ranks: _bytes(args[0])),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", lambda args, ranks: (ranks - 1) * _bytes(args[0])),
    "_c10d_functional::reduce_scatter_tensor": (
        "reduce-scatter",
        lambda args, ranks: (ranks - 1) * _bytes(args[0]) // ranks,
    ),
    "_c10d_functional::all_reduce": ("all-reduce", lambda args, ranks: 2 * (ranks - 1) * _bytes(args[0]) // ranks),
}
# What a rank waits for, and what others send it.
UNCOUNTED = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::recv_")


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of collectives, and the bytes that this rank sends in them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether Dynamo may compile while this mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it is called again with local tensors
        name = func.name()
        if func.namespace in ("c10d", "_c10d_functional") and name not in UNCOUNTED:
            if name not in COUNTED:
                raise NotImplementedError(f"{name} is not counted; add it to COUNTED")
            kind, sent = COUNTED[name]
            self.calls[kind] += 1
            self.sent[kind] += sent(args, compat.group_size(args))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Count:
    """What one rank does in one step. sites and rewritten count a block once, however many are compiled alike."""

    division: str
    ranks: int
    rank: int
    compiled: str
    blocks: int
    calls: dict[str, int]
    sent: dict[str, int]
    sites: int = 0
    rewritten: int = 0


def count(config: Config, division: str, ranks: int, rank: int, compiled: str) -> Count:
    """What a rank sends in its second training step; in the first, stages and units are made ready."""
    report = Report()
    with compat.imitated_job(rank, ranks):
        parallel, fake = Parallel.of(division, "cpu"), FakeTensorMode(shape_env=ShapeEnv())
        fake.allow_non_fake_inputs = True  # constants of the model
        with fake:
            model = LanguageModel(config, torch.bfloat16)
            rows = [torch.randint(256, (ranks, config.context)) for _ in range(2)]
        stages = parallel.divide(model, "1f1b")
        blocks = [block for stage in stages for block in stage.blocks.values()]
        backend = functools.partial(_compiled, report)  # one for all: blocks that are alike are compiled once
        for block in blocks if compiled == "mhc" else ():
            block.compile(backend=backend, fullgraph=True)
        trained = [parallel.average(stage) for stage in stages]
        parameters = [parameter for stage in trained for parameter in stage.parameters()]
        optimizer = torch.optim.AdamW(parameters)
        pipeline = parallel.pipeline(trained, "1f1b", "cpu", ranks // parallel.parts)
        if pipeline is not None:
            compat.agree_on_given_shapes(pipeline.schedule)
        ids, targets = (parallel.share(part) for part in rows)
        for _ in range(2):
            with fake, Collectives() as seen:
                if pipeline is None:
                    trained[0](ids, targets=targets).loss.backward()
                else:
                    pipeline.run(ids, targets)
                parallel.clip(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad()
    sites, rewritten = len(report.sites), len(report.rewritten)
    return Count(division, ranks, rank, compiled, len(blocks), dict(seen.calls), dict(seen.sent), sites, rewritten)


def _compiled(report: Report, gm: fx.GraphModule, inputs: Any) -> Any:
    """Rewrite a graph, and run it without Inductor, whose code takes no fake tensors."""
    report.add(passes.run_recursively(gm))
    return compat.compile_without_inductor(gm, inputs, lambda joint: None)


def chosen(division: str, ranks: int) -> list[int]:
    """A rank of each kind: of the first stage, of the second, which is like others between, and of the last.

    The ranks of a stage have parts of the same size, padded if need be.
    """
    stages = sizes_of(division, ranks).get("pp", 1)
    return sorted({stage * (ranks // stages) for stage in (0, min(1, stages - 1), stages - 1)})


def counts(config: Config, divisions: Mapping[int, Sequence[str]]) -> Iterator[Count]:
    """Each division of the work, on each rank that may differ, eager and rewritten."""
    jobs = [
        (config, division, ranks, rank, compiled)
        for ranks, listed in divisions.items()
        for division in listed
        for rank in chosen(division, ranks)
        for compiled in COMPILED
    ]
    # A process for each: torch keeps the groups of a job beyond its end.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.pipelining", "mhc_compile.passes"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(_count, jobs)
        pool.close()
        pool.join()


def _count(job: tuple[Config, str, int, int, str]) -> Count:
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # of sums over two dims of a mesh, one by one
    return count(*job)


def table(content: dict[str, Any]) -> str:
    """Markdown: for each division what the rank sends that sends the most. ValueError if mhc's differs from eager's."""
    lines = [
        "| ranks | division | " + " | ".join(f"{kind}, GB" for kind in KINDS) + " | total, GB | collectives | sites |",
        "|---" * (len(KINDS) + 5) + "|",
    ]
    groups: dict[tuple[int, str], dict[tuple[int, str], dict[str, Any]]] = {}
    for each in content["counts"]:
        groups.setdefault((each["ranks"], each["division"]), {})[each["rank"], each["compiled"]] = each
    for (ranks, division), found in groups.items():
        for (rank, compiled), each in found.items():
            eager = found[rank, "eager"]
            if (each["sent"], each["calls"]) != (eager["sent"], eager["calls"]):
                raise ValueError(f"{division}, rank {rank} of {ranks}: {compiled} does not send what eager code sends")
        most = max(
            (each for each in found.values() if each["compiled"] == "mhc"), key=lambda each: sum(each["sent"].values())
        )
        sent = [most["sent"].get(kind, 0) for kind in KINDS]
        numbers = " | ".join(f"{each / 1e9:.2f}" if each else "-" for each in (*sent, sum(sent)))
        sites = f"{most['rewritten']} of {most['sites']}"
        lines.append(f"| {ranks} | `{division}` | {numbers} | {sum(most['calls'].values())} | {sites} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.communication", description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", choices=("count", "table"), default="count")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "results" / "communication.json")
    options = parser.parse_args(arguments)
    if options.command == "count":
        about = environment(torch.device("cpu"))
        found = []
        for each in counts(MODEL, DIVISIONS):
            found.append(asdict(each))
            print(each, file=sys.stderr)
        content = about | {"model": asdict(MODEL), "rows": "one a rank", "dtype": "bfloat16", "counts": found}
        options.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(json.loads(options.file.read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
