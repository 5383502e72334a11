"""PEFT: adapters on sublayers and on phi, merged ones, and modules that are trained as a whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

import mhc_compile
from tests.e2e.deepseek_models import deepseek
from tests.integrations.programs import assert_all_are_rewritten, compare, tokens, whole
from tests.zoo import check
from tests.zoo.near import Sublayer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _adapted(model: nn.Module, **config: Any) -> PeftModel:
    # Adapters begin as zeros, with which a wrong one would do no harm.
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **config))


@pytest.mark.parametrize(
    ("layers", "config"),
    [
        (2, {"target_modules": ["q_a_proj", "o_b_proj", "down_proj"]}),
        pytest.param(
            1, {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}, marks=pytest.mark.thorough
        ),
        (1, {"target_modules": ["q_a_proj"], "modules_to_save": ["ffn_hc", "hc_head"]}),
    ],
    ids=["sublayers", "experts", "modules_to_save"],
)
def test_adapters_beside_hyper_connections(layers: int, config: dict[str, Any]) -> None:
    outcome = compare(_adapted(deepseek(layers), **config), whole)
    check.assert_as_accurate(outcome)
    assert_all_are_rewritten(outcome.report, layers)
    trained = {name for name in outcome.rewritten if name.startswith("gradient of")}
    assert any("lora_A" in name for name in trained)
    assert any("ffn_hc.modules_to_save" in name for name in trained) == ("modules_to_save" in config)


def test_merged_adapters() -> None:
    """phi's adapter is gone from the program, so that it is rewritten as a whole."""
    adapted = _adapted(deepseek(2), target_modules=["q_a_proj"], target_parameters=["attn_hc.fn", "ffn_hc.fn"])
    before = deepseek(2).model.layers[0].attn_hc.fn
    model = adapted.merge_and_unload()
    assert model.model.layers[0].attn_hc.fn.shape == before.shape
    model.requires_grad_(True)
    outcome = compare(model, whole)
    check.assert_as_accurate(outcome)
    assert_all_are_rewritten(outcome.report)


@pytest.mark.slow
def test_an_adapter_on_the_parameter_phi() -> None:
    """PEFT parametrizes it, where Dynamo breaks the graph: what is cut there is told."""
    model = _adapted(deepseek(1), target_modules=[], target_parameters=["attn_hc.fn"])
    outcome = compare(model, whole)
    check.assert_as_accurate(outcome)
    told = str(mhc_compile.explain(model, input_ids=tokens()))
    assert "expand_combine" in told
    # Either Dynamo or the passes get better, or both places are named.
    assert "cut" not in told or ("parametrize.py" in told and "modeling_deepseek_v4.py" in told)


class _WithLinear(Sublayer):
    """phi is a module."""

    def __init__(self) -> None:
        super().__init__(4, 8, 3, 2)
        self.projection = nn.Linear(self.phi.shape[1], self.phi.shape[0], bias=False)

    def project(self, flat: Tensor) -> Tensor:
        projected: Tensor = self.projection(flat)
        return projected


def test_an_adapter_on_a_linear_phi() -> None:
    """What is rewritten of it is right, and what is not is told."""
    model = _adapted(_WithLinear(), target_modules=["projection"])
    outcome = check.run(model, (torch.randn(2, 3, 4, 8),))
    check.assert_as_accurate(outcome)
    operators = {site.op for site in outcome.report.rewritten}
    assert "expand_combine" in operators
    assert outcome.report.declined or operators & {"generate_mix", "generate_mix_and_aggregate", "projection"}, str(
        outcome.report
    )
