"""Train a byte-level language model with hyper-connections, on one process or on many.

    python examples/train_lm.py --steps 200
    python examples/train_lm.py --variant v41 --compile inductor
    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --parallel fsdp
    torchrun --standalone --nproc-per-node 4 examples/train_lm.py --parallel fsdp=2,tp=2

It trains on the sources of Python's standard library. Look at `language_model/connections.py` for the
hyper-connections, which are plain PyTorch, and at `language_model/parallel.py` for how a model is divided.

The folder `--out` gets `losses.csv`, `summary.json`, checkpoints, and a plot `losses.png` if matplotlib is there.
`--resume` goes on from the checkpoint, under any division. `--variant plain` has residual connections in place of
hyper-connections; the difference in speed is what hyper-connections cost.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from language_model.connections import VARIANTS
from language_model.data import Text
from language_model.model import SIZES, LanguageModel
from language_model.parallel import SCHEDULES, Parallel, of_each_mesh
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import mhc_compile

JUDGED = (1, 10, 100)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="nano", help="of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, help="how many blocks, in place of the size's")
    parser.add_argument("--context", type=int, help="tokens of a row, in place of the size's")
    parser.add_argument("--variant", choices=VARIANTS, default="mhc", help="the hyper-connection (default %(default)s)")
    parser.add_argument("--compile", choices=("eager", "inductor", "mhc"), default="mhc", help="(default %(default)s)")
    parser.add_argument("--parallel", default="", help="how processes divide the work, e.g. fsdp=2,tp=2 (default ddp)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of stages (default %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step, of all processes (default %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="(default %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate (default %(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of all gradients (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and rows (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("train_lm"), help="folder of results (default %(default)s)")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (default: none)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument(
        "--judge", action="store_true", help=f"compare all gradients with float64, before steps {JUDGED}; one process"
    )
    return parser.parse_args()


@contextlib.contextmanager
def job() -> Iterator[tuple[str, bool]]:
    """The device of this process, and whether it is the one that reports."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        yield kind, True
        return
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    yield kind, dist.get_rank() == 0
    dist.destroy_process_group()


def learning_rate(step: int, steps: int, highest: float) -> float:
    """A linear start of a twentieth of all steps, then a cosine down to a tenth."""
    start = max(1, steps // 20)
    if step < start:
        return highest * (step + 1) / start
    done = (step - start) / max(1, steps - start)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def whole_state(stages: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]], step: int) -> dict[str, Any]:
    """Names and shapes of the whole model, however it is divided, so that any division can load them."""
    model, optimizer = {}, {}
    for _, weights, moments in stages:
        model |= weights
        optimizer |= moments["state"]
    return {"model": model, "optimizer": optimizer, "step": torch.tensor(step)}


class Trainer:
    def __init__(self, options: argparse.Namespace, device: str) -> None:
        self.options, self.device = options, device
        self.parallel = Parallel.of(options.parallel, device)
        others = {name: value for name in ("layers", "context") if (value := getattr(options, name)) is not None}
        self.config = replace(SIZES[options.size], variant=options.variant, **others)
        self._check()
        torch.manual_seed(options.seed)  # every process begins with the same weights
        with torch.device(device):
            self.model = LanguageModel(self.config, getattr(torch, options.dtype))
        self.size = sum(p.numel() for p in self.model.parameters())
        self.stages = self.parallel.divide(self.model, options.schedule)
        self._compile()
        self.trained = [self.parallel.average(stage) for stage in self.stages]
        self.pipeline = self.parallel.pipeline(
            self.trained, options.schedule, device, options.batch // self.parallel.parts
        )
        self.parameters = [p for stage in self.trained for p in stage.parameters()]
        groups = [{"params": group} for group in of_each_mesh(self.parameters)]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
        self.text, self.step = Text(options.seed), 0

    def _check(self) -> None:
        if self.options.judge and dist.is_initialized():
            raise ValueError("--judge: compares a whole model with float64, so it takes one process, without torchrun")
        if self.options.batch % self.parallel.parts:
            raise ValueError(f"--batch: {self.options.batch} rows do not divide into {self.parallel.parts} parts")

    def _compile(self) -> None:
        if self.options.compile == "eager":
            return
        for stage in self.stages:
            # Layers that are divided are compiled one by one; a whole model is compiled as one graph.
            for module in stage.blocks.values() if self.parallel.divides_layers else [stage]:
                module.compile(backend=self.options.compile)

    def train_step(self) -> tuple[float, float]:
        """One step: the loss of all rows, and the norm of all gradients before they are clipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.options.steps, self.options.lr)
        rows = self.text.rows(self.step, self.options.batch, self.config.context)
        # Contiguous, as pipeline stages expect it.
        ids, targets = (self.parallel.share(part).contiguous().to(self.device) for part in rows)
        self.optimizer.zero_grad(set_to_none=True)
        if self.pipeline is None:
            loss = self.trained[0](ids, targets=targets).loss
            loss.backward()
        else:
            loss = self.pipeline.run(ids, targets)
        norm = self.parallel.clip(self.parameters, self.options.clip)
        self.optimizer.step()
        self.step += 1
        return self.parallel.mean(loss), norm

    def judge(self) -> mhc_compile.Verification:
        """Whether the compiled gradients of the next step, of the weights as they are, are as accurate as eager's."""
        rows = self.text.rows(self.step, min(4, self.options.batch), self.config.context)
        ids, targets = (part.to(self.device) for part in rows)
        return mhc_compile.verify(self.model, ids, targets=targets, inductor=False, say=None, raises=False)

    def states(self) -> list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]]:
        """Of each stage of this process, its weights and the optimizer's state."""
        return [(stage, *get_state_dict(stage, self.optimizer)) for stage in self.trained]

    def save(self) -> None:
        dcp.save(whole_state(self.states(), self.step), checkpoint_id=self.options.out / "checkpoint")

    def load(self) -> None:
        stages = self.states()
        state = whole_state(stages, self.step)
        dcp.load(state, checkpoint_id=self.options.out / "checkpoint")
        for stage, _, now in stages:
            moments = {"state": state["optimizer"], "param_groups": now["param_groups"]}
            set_state_dict(stage, self.optimizer, model_state_dict=state["model"], optim_state_dict=moments)
        self.step = int(state["step"])

    def summary(self, rows: list[dict[str, float]]) -> dict[str, float]:
        """What the steps of this run took. The median leaves out the first half of them, in which code is compiled."""
        peak = torch.tensor(torch.cuda.max_memory_allocated() if self.device == "cuda" else 0, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(peak, dist.ReduceOp.MAX)
        speeds = [row["tokens_per_second"] for row in rows]
        tokens = self.options.batch * self.config.context
        return {
            "processes": dist.get_world_size() if dist.is_initialized() else 1,
            "parameters": self.size,
            "tokens": tokens,
            "tokens_per_second": statistics.median(speeds[len(speeds) // 2 :]),
            "first_step_seconds": tokens / speeds[0],
            "peak_bytes_of_a_device": peak.item(),
        }


@contextlib.contextmanager
def progress(reports: bool, steps: int) -> Iterator[Callable[[int, str], None]]:
    """What shows a step's line: a bar on a terminal if `rich` is installed, else lines; nothing on other processes."""
    if reports and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
            with Progress(*columns) as bar:
                task = bar.add_task("", total=steps)
                yield lambda step, line: bar.update(task, completed=step, description=line)
            return
    yield lambda step, line: print(f"step {step}/{steps}  {line}", flush=True) if reports else None


def plot(file: Path, rows: list[dict[str, float]]) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows])
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def main() -> None:
    options = arguments()
    with job() as (device, reports):
        trainer = Trainer(options, device)
        if options.resume:
            trainer.load()
        options.out.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, float]] = []
        with progress(reports, options.steps) as show:
            while trainer.step < options.steps:
                if options.judge and trainer.step + 1 in JUDGED:
                    found = trainer.judge()
                    print(f"step {trainer.step + 1}: {'as accurate as eager' if found.ok else found}", flush=True)
                    if not found.ok:
                        raise SystemExit(1)
                begin = time.perf_counter()
                loss, norm = trainer.train_step()
                tokens = options.batch * trainer.config.context / (time.perf_counter() - begin)
                rows.append({"step": trainer.step, "loss": loss, "gradient_norm": norm, "tokens_per_second": tokens})
                show(trainer.step, f"loss {loss:.4f}  gradient norm {norm:.3f}  {tokens:,.0f} tokens/s")
                if options.save_every and trainer.step % options.save_every == 0:
                    trainer.save()
        summary = trainer.summary(rows) if rows else {}
        if reports and rows:
            (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
            with (options.out / "losses.csv").open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
            plot(options.out / "losses.png", rows)
            if options.compile == "mhc":
                print(mhc_compile.report())


if __name__ == "__main__":
    main()
