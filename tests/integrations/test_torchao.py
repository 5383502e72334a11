"""torchao: sublayers whose weights are int8 or float8, and sublayers that are trained in float8.

The judge is float64 without quantization: eager code is as far from it as the quantization takes it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from tests.e2e.deepseek_models import deepseek
from tests.integrations.programs import assert_all_are_rewritten, compare, whole
from tests.zoo import check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _is_sublayer(module: nn.Module, name: str) -> bool:
    return type(module) is nn.Linear and ("self_attn" in name or "shared_experts" in name)


@pytest.mark.parametrize(
    "config", [Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig]
)
def test_quantized_sublayers(config: type[Any]) -> None:
    model = deepseek(2).eval()
    exact = copy.deepcopy(model)
    quantize_(model, config(), filter_fn=_is_sublayer)
    outcome = compare(model, whole, exact=exact, backward=False)
    check.assert_as_accurate(outcome)
    assert_all_are_rewritten(outcome.report)


def test_sublayers_that_are_trained_in_float8() -> None:
    model = deepseek(2)
    exact = copy.deepcopy(model)
    # Without a GPU the products are emulated.
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=_is_sublayer)
    outcome = compare(model, whole, exact=exact)
    assert outcome.exact is not None
    outcome.more = None  # the draws are judged as they are
    # A router whose weights are normalised over its choice has an exact gradient of zero. Its terms are of size 1, so
    # float64 leaves 1e-16 and float32 1e-7: no ratio of the two says anything.
    for name in [name for name, value in outcome.exact.items() if value.norm() < 1e-12]:
        assert outcome.rewritten[name].abs().max() < 1e-5, name
        for results in (outcome.exact, outcome.eager, outcome.rewritten):
            del results[name]
    check.assert_as_accurate(outcome)
    assert_all_are_rewritten(outcome.report)
    assert any(name.startswith("gradient of") for name in outcome.rewritten)
