"""Eager models that use hyper-connections, each in the style of one code base; the variants the passes must find.

`ZOO` maps a name to a `Specimen`: how to build the model, and the operators that a complete rewrite of it holds.
Every model maps token embeddings of three dimensions, the last of size C, to the same shape, and returns the
streams as a second result, because a mean over them cannot see how they were mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from tests.zoo.deepseek import DeepSeek
from tests.zoo.hunyuan import Hunyuan
from tests.zoo.independent import Independent
from tests.zoo.liger import Liger
from tests.zoo.lucidrains import HyperConnectionsPackage, Lucidrains
from tests.zoo.megatron import Megatron
from tests.zoo.paper import Einops, Paper
from tests.zoo.tilekernels import TileKernels
from tests.zoo.transformer_engine import TransformerEngine

__all__ = ["ZOO", "Specimen"]

READ = "generate_mix_and_aggregate"
WRITE = "expand_combine"


@dataclass(frozen=True)
class Specimen:
    """One model: `build(**changes)` makes it, `per_sublayer` and `once` are the operators of a complete rewrite."""

    build: Callable[..., nn.Module]
    per_sublayer: tuple[str, ...] = (READ, WRITE)
    once: tuple[str, ...] = ()

    def operators(self, layers: int) -> list[str]:
        return sorted([*self.per_sublayer * layers, *self.once])


def _with(build: Callable[..., nn.Module], **fixed: Any) -> Callable[..., nn.Module]:
    return lambda **changes: build(**{**fixed, **changes})


ZOO: dict[str, Specimen] = {
    "deepseek": Specimen(DeepSeek, once=("head",)),
    "deepseek-mean": Specimen(_with(DeepSeek, head="mean")),
    "tilekernels": Specimen(TileKernels),
    "tilekernels-weighted": Specimen(_with(TileKernels, weighted=True)),
    "transformer-engine": Specimen(TransformerEngine),
    "transformer-engine-unbiased": Specimen(_with(TransformerEngine, layer_bias=False)),
    "liger": Specimen(Liger),
    "liger-pre-eps": Specimen(_with(Liger, pre_eps=1e-4)),
    "megatron-main": Specimen(Megatron),
    "megatron-main-analytic": Specimen(_with(Megatron, sinkhorn="analytic")),
    "megatron-main-recomputing": Specimen(_with(Megatron, sinkhorn="recomputing")),
    "megatron-dev": Specimen(_with(Megatron, branch="dev"), once=("head",)),
    "paper": Specimen(Paper),
    "einops": Specimen(Einops),
    "independent": Specimen(Independent),
    "hunyuan": Specimen(Hunyuan, once=("head",)),
    "lucidrains": Specimen(Lucidrains, per_sublayer=("projection", "sinkhorn", "aggregate", WRITE)),
    "lucidrains-log": Specimen(
        _with(Lucidrains, log_domain=True), per_sublayer=("projection", "sinkhorn", "aggregate", WRITE)
    ),
    "hyper-connections": Specimen(HyperConnectionsPackage, per_sublayer=("projection", "sinkhorn", "aggregate", WRITE)),
    "hyper-connections-log": Specimen(
        _with(HyperConnectionsPackage, log_domain=True), per_sublayer=("projection", "sinkhorn", "aggregate", WRITE)
    ),
}
