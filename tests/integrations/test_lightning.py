"""Lightning's Trainer with a model that is compiled, alone or as part of its LightningModule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mhc_compile
from tests.zoo.near import Sublayer

lightning = pytest.importorskip("lightning", reason="Lightning is missing; the extra test installs it")

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo", "passes_only"),
    # One worker loads the rows, and nothing is logged.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # Lightning calls what newer releases of torch have deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
]
STEPS = 3


class TwoSublayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Sublayer(4, 6, 3, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Regression(lightning.LightningModule):  # type: ignore[misc]
    """A model that is trained to give back what it gets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        (x,) = batch
        loss = (self.model(x) - x).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _losses(module: Regression, compiled: Any) -> list[float]:
    rows = torch.utils.data.TensorDataset(torch.randn(STEPS, 3, 4, 6, generator=torch.Generator().manual_seed(0)))
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(compiled, torch.utils.data.DataLoader(rows))
    return module.losses


def _in_place(module: Regression) -> Any:
    module.model.compile(backend="mhc")
    return module


def _as_a_whole(module: Regression) -> Any:
    return torch.compile(module, backend="mhc")


@pytest.mark.parametrize("compiled", [_in_place, _as_a_whole])
def test_a_model_that_lightning_trains(compiled: Callable[[Regression], Any]) -> None:
    model = TwoSublayers()
    module, ours = Regression(model), Regression(copy.deepcopy(model))
    eager = _losses(module, module)
    assert _losses(ours, compiled(ours)) == pytest.approx(eager, rel=1e-5)  # float32 in other orders
    assert len(eager) == STEPS
    assert eager[-1] < eager[0]
    report = mhc_compile.report()
    assert (len(report.rewritten), report.declined, report.errors) == (4, [], []), str(report)
