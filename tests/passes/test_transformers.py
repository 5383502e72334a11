"""The hyper-connections of transformers' models, as they stand, around the cheapest of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import check
from tests.zoo.common import random_parameter

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")

N, WIDTH = 4, 16


def _part(family: str, name: str, config: Any) -> nn.Module:
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    part: nn.Module = getattr(module, name)(config)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return part


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.weight = random_parameter(WIDTH, WIDTH, std=WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x) @ self.weight)


class Mixed(nn.Module):
    """GLM's: complete connections."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

        config = Glm5NextTextConfig(hidden_size=WIDTH, hc_mult=N)
        self.mixes = nn.ModuleList(_part("glm5_next", "Glm5NextTextHyperConnection", config) for _ in range(2))
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for mix, layer in zip(self.mixes, self.layers, strict=True):
            dtype = x.dtype
            post, comb, u = mix(x)
            x = post.to(dtype).unsqueeze(-1) * layer(u).unsqueeze(-2) + comb.to(dtype).transpose(-1, -2) @ x
        return x


class Independent(nn.Module):
    """Hunyuan's: the residual is added as it is, and the head is learned."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config

        config = HYV4Config(hidden_size=WIDTH, hc_mult=N)
        self.mixes = nn.ModuleList(_part("hy_v4", "HYV4HyperConnection", config) for _ in range(2))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = _part("hy_v4", "HYV4HyperHead", config)

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        for mix, layer in zip(self.mixes, self.layers, strict=True):
            post, u = mix(x)
            x = (post.float().unsqueeze(-1) * layer(u).float().unsqueeze(-2) + x.float()).to(dtype)
        return self.head(x)


class Gated(nn.Module):
    """Qwen's: a read with gates of low rank for each channel, after a norm of each stream, and a usual write."""

    flat = False
    of_another = False

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

        config = Qwen4ExpTextConfig(hidden_size=WIDTH, hc_count=N, hc_lowrank=8)
        self.mix = _part("qwen4_exp", "Qwen4ExpTextGatedResidual", config)
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        u, residual, gate = self.mix(x.flatten(-2))
        if self.of_another:
            residual = residual.softmax(-1)
        written = gate.unsqueeze(-1) * self.layer(u).unsqueeze(-2)
        if self.flat:  # as the model has it
            return (residual + written.flatten(-2)).unflatten(-1, (N, WIDTH))
        return residual.unflatten(-1, (N, WIDTH)) + written


class Flat(Gated):
    flat = True


class OfAnother(Gated):
    """What is written to are no streams that the sublayer reads."""

    of_another = True


PAIR = ["expand_combine", "generate_mix_and_aggregate"]


@pytest.mark.parametrize(
    ("build", "operators"),
    [
        (Mixed, sorted(PAIR * 2)),
        (Independent, sorted([*PAIR * 2, "head"])),
        (Gated, ["expand_combine", "projection"]),
        (Flat, ["expand_combine", "projection"]),
        (OfAnother, []),
    ],
)
def test_operators(build: type[nn.Module], operators: list[str]) -> None:
    outcome = check.run(build(), (torch.randn(2, 3, N, WIDTH),), repeats=2)
    assert outcome.operators == operators, str(outcome.report)
    check.assert_as_accurate(outcome)
