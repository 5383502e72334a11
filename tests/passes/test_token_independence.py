"""Calls that treat each token alone, and those that do not, of tensors with 61 tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mhc_compile.passes.recognise.token_independence import MixesTokens, TokensAlone

Call = Callable[[Tensor], Tensor]
TOKENS, CHANNELS = 61, 6

ALONE: dict[str, Call] = {
    "all tokens": lambda x: x[:, :],
    "all tokens, as a traced program takes them": lambda x: torch.ops.aten.slice.Tensor(x, 0, 0, 2**63 - 1),
    "some channels": lambda x: x[:, 1:4],
    "every other channel": lambda x: x[:, ::2],
    "sum over channels": lambda x: x.sum(-1),
    "product with a matrix": lambda x: x @ torch.ones(CHANNELS, 2, dtype=x.dtype),
    "zeros of another dtype": lambda x: torch.zeros_like(x, dtype=torch.int64),
}
TOGETHER: dict[str, Call] = {
    "every other token": lambda x: x[::2],
    "without the first token": lambda x: x[1:],
    "without the last token": lambda x: x[:60],
    "sum over tokens": lambda x: x.sum(0),
    "sum over everything": lambda x: x.sum(),
    "sum over no dimension named": lambda x: x.sum(()),
    "maximum of everything": lambda x: x.max(),
    "product over tokens": lambda x: x.mT @ x,
    "place": lambda x: x.cumsum(0),
}


@pytest.mark.parametrize("call", ALONE.values(), ids=ALONE)
def test_each_token_alone(call: Call) -> None:
    x = torch.randn(TOKENS, CHANNELS, dtype=torch.float64)
    with TokensAlone([TOKENS]):
        result = call(x)
    torch.testing.assert_close(result, call(x), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("call", TOGETHER.values(), ids=TOGETHER)
def test_tokens_together(call: Call) -> None:
    with TokensAlone([TOKENS]), pytest.raises(MixesTokens):
        call(torch.ones(TOKENS, CHANNELS, dtype=torch.float64))
