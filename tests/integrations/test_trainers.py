"""Trainers that compile on their own: transformers' Trainer, TRL's SFTTrainer, accelerate."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

import mhc_compile
from tests.e2e.deepseek_models import deepseek
from tests.integrations.programs import tokens

STEPS = 2
# One row of tokens is one batch. Plain gradient descent: Adam divides by gradients, rounding errors included.
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "max_steps": STEPS,
    "optim": "sgd",
    "learning_rate": 0.1,
    "use_cpu": True,
    "bf16": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def _rows() -> Dataset:
    rows = tokens().tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def _losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _by_trainer(model: nn.Module, compiled: bool, folder: Path) -> list[float]:
    settings = TrainingArguments(output_dir=str(folder), torch_compile=compiled, **SETTINGS)
    return _losses(Trainer(model=model, args=settings, train_dataset=_rows()))


def _by_trl(model: nn.Module, compiled: bool, folder: Path) -> list[float]:
    words = {"<pad>": 0, "<eos>": 1} | {str(number): number for number in range(2, 128)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    # TRL's own loss of the routers wants another name for their number, and these layers route by a hash.
    own: dict[str, Any] = {"gradient_checkpointing": False, "router_aux_loss_coef": 0.0}
    settings = SFTConfig(output_dir=str(folder), torch_compile=compiled, **own, **SETTINGS)
    return _losses(SFTTrainer(model=model, args=settings, train_dataset=_rows(), processing_class=tokenizer))


def _by_accelerate(model: nn.Module, compiled: bool, folder: Path) -> list[float]:
    AcceleratorState._reset_state(reset_partial_state=True)  # it would keep the settings of the first one
    accelerator = Accelerator(cpu=True, dynamo_backend="inductor" if compiled else "no")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for row in tokens():
        loss = model(input_ids=row[None], labels=row[None]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Dynamo of torch 2.13 makes an instance of the autograd function in TRL's loss.
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
# Inductor compiles in earnest, as it does for their users; one layer takes a minute or two.
@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_dynamo", "fresh_cache")
@pytest.mark.parametrize("train", [_by_trainer, _by_trl, _by_accelerate])
def test_a_trainer_that_compiles(train: Callable[[nn.Module, bool, Path], list[float]], tmp_path: Path) -> None:
    model = deepseek(1)
    eager = train(copy.deepcopy(model), False, tmp_path)
    with mhc_compile.enable():
        compiled = train(model, True, tmp_path)
    # TRL computes its loss in graphs of its own, and a model may be compiled again for a tensor of another kind.
    report = mhc_compile.report()
    assert report.declined == report.errors == []
    # Dynamo gives up on a function of that loss, and the report names it. No hyper-connection is cut.
    assert [site for site in report.cut if site.op != "function"] == []
    assert all("trl/" in site.location.name for site in report.cut), str(report)
    counts = Counter(site.op for site in report.rewritten)
    assert counts["generate_mix_and_aggregate"] == counts["expand_combine"] == 2 * counts["head"] > 0, str(report)
    assert len(eager) == STEPS
    # float32 in other orders: a thousand roundings of it.
    assert compiled == pytest.approx(eager, rel=1e-4)


def test_no_trainer_takes_a_backend_by_its_name() -> None:
    """They know the names of a list of their own. Where that changes, README can say so."""
    with pytest.raises(ValueError, match="MHC"):
        TorchDynamoPlugin(backend="mhc")
