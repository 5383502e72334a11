"""The eager modules: what they compute, how they start, and that the passes rewrite all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import mhc_compile
from mhc_compile import ops, passes
from mhc_compile.forms import SINKHORN_STARTS, Gates, Rms, Sinkhorn
from mhc_compile.nn import Form, HyperConnection, HyperHead, contract, expand
from mhc_compile.testing.float64 import Float64Reference
from tests.ops import eager

N, C = 4, 24

FORMS = {
    "deepseek_v4": Form.deepseek_v4(),
    "transformer_engine": Form.transformer_engine(),
    "liger": Form.liger(),
    "megatron": Form.megatron(),
    "megatron softmax": Form.megatron(softmax=True),
    "clamped columns": Form(
        Rms(1e-13, "clamp"), Gates(0.0, 1.0, 1e-3), Sinkhorn(10, "exp", "columns", 1e-12, 0.0, True), False
    ),
    "log softmax": Form(Rms(), Gates(), Sinkhorn(3, "softmax", "columns", 0.0, 0.0), True),
    "no norm": Form(Rms(0.0, "none"), Gates(), Sinkhorn(7), True),
    **{
        f"from {start}": Form(Rms(), Gates(), Sinkhorn(6, start, "rows", 1e-3, 1e-4), True) for start in SINKHORN_STARTS
    },
}


class Stack(nn.Module):
    """Entry, two sublayers, and the exit; every parameter away from its initial value."""

    def __init__(self, form: Form, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            HyperConnection(nn.Sequential(nn.Linear(C, C), nn.Tanh()), dim=C, streams=N, form=form) for _ in range(2)
        )
        self.head = HyperHead(C, N, form=form)
        for block in self.blocks:
            block.layer.to(dtype)
        with torch.no_grad():
            for module in (*self.blocks, self.head):
                for own in (module.phi, module.scale, module.bias):
                    own.copy_(torch.randn_like(own))
                module.phi.mul_((N * C) ** -0.5)

    def forward(self, f: Tensor) -> Tensor:
        x = expand(f, N)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


def rewritten(model: nn.Module) -> Callable[..., Any]:
    """The model with its graphs rewritten and nothing compiled."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        report = passes.run_recursively(gm)
        assert not report.declined
        assert not report.errors
        return gm.forward  # type: ignore[no-any-return]

    return torch.compile(model, backend=backend, fullgraph=True)


def outputs_and_gradients(call: Callable[..., Any], model: nn.Module, f: Tensor) -> list[Tensor]:
    leaf = f.clone().requires_grad_()
    model.zero_grad()
    out = call(leaf)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weight).sum().backward()
    gradients = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def errors(results: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [((r.double() - t).norm() / t.norm()).item() for r, t in zip(results, truth, strict=True)]


@pytest.mark.parametrize("name", FORMS)
def test_every_site_of_the_modules_is_rewritten(name: str, fresh_dynamo: None) -> None:
    report = mhc_compile.explain(Stack(FORMS[name]), torch.randn(2, 3, C))
    assert [site.op for site in report.rewritten] == [
        "generate_mix_and_aggregate",
        "expand_combine",
        "generate_mix_and_aggregate",
        "expand_combine",
        "head",
    ]
    assert report.declined == []
    # A Sinkhorn left in the graph would not be a site of its own.
    assert [("sinkhorn" in site.detail) for site in report.rewritten] == [True, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_rewritten_modules_are_as_accurate_as_eager_ones(name: str, dtype: torch.dtype, fresh_dynamo: None) -> None:
    model = Stack(FORMS[name], dtype)
    reference, fused = Float64Reference(model), rewritten(model)
    names = ["output", "input", *(key for key, _ in model.named_parameters())]
    own, theirs = [], []

    def worse() -> list[str]:
        """What is less accurate over more inputs than before."""
        for _ in range(6):
            f = torch.randn(2, 64, C).to(dtype)
            truth = outputs_and_gradients(reference, reference.module, f.double())
            assert len(truth) == len(names)
            theirs.append(errors(outputs_and_gradients(model, model, f), truth))
            own.append(errors(outputs_and_gradients(fused, model, f), truth))
        compared = zip(names, _rms(own), _rms(theirs), strict=True)
        # Both round the streams between sublayers to dtype, so errors are alike and differ by chance: little where
        # there are many numbers, but a gradient of scale is 3 of them.
        return [key for key, mine, eager in compared if mine > (2.0 if key.endswith("scale") else 1.25) * eager + 2e-6]

    # A gradient of bias is 24 numbers: what is only bad luck is gone with more inputs.
    assert not all(worse() for _ in range(12)), worse()


def _rms(samples: list[list[float]]) -> list[float]:
    return [(sum(value * value for value in values) / len(values)) ** 0.5 for values in zip(*samples, strict=True)]


@pytest.mark.parametrize("name", FORMS)
def test_the_module_computes_what_the_operators_do(name: str) -> None:
    form = FORMS[name]
    block = HyperConnection(nn.Linear(C, C), dim=C, streams=N, form=form, dtype=torch.float64).double()
    x, phi, scale, bias = eager.mix_arguments(N, C)
    block.load_state_dict({"phi": phi, "scale": scale, "bias": bias}, strict=False)
    scalars = form.rms.as_kwargs() | form.gates.as_kwargs() | form.sinkhorn.as_kwargs()
    h_pre, h_post, h_res = ops.generate_mix(x, phi, scale, bias, **scalars)
    f = block.layer(ops.aggregate(x, h_pre))
    expected = ops.expand_combine(f, None, h_post, x, h_res if form.transposed else h_res.mT)
    # Float64 on both sides.
    torch.testing.assert_close(block(x), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("form", "function"),
    [
        (Form.deepseek_v4(), eager.deepseek),
        (Form.transformer_engine(), eager.transformer_engine),
        (Form.megatron(iterations=6), eager.megatron),
    ],
)
def test_mixes_are_those_of_independent_spellings(form: Form, function: Callable[..., Any]) -> None:
    x, phi, scale, bias = eager.mix_arguments(N, C)
    block = HyperConnection(nn.Identity(), dim=C, streams=N, form=form, dtype=torch.float64)
    block.load_state_dict({"phi": phi, "scale": scale, "bias": bias})
    layer_input, h_post, h_res = function(x, phi, scale, bias)
    pre, post, res = block.mixes(x)
    # Float64 on both sides; log potentials and log P round differently.
    torch.testing.assert_close((pre.unsqueeze(-1) * x).sum(-2), layer_input, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(post, h_post, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(res, h_res, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("streams", [1, 2, 4, 5])
def test_paper_init_begins_as_a_pre_norm_residual_block(streams: int) -> None:
    layer = nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C))
    block = HyperConnection(layer, dim=C, streams=streams)
    f = torch.randn(5, C)
    residual = f + layer(f)
    out = block(expand(f, streams))
    assert out.shape == (5, streams, C)
    # Gates move by scale * l / 4 = 0.01 / 4 * N(0, 0.02 sqrt(n C)) and with one stream h_pre is 1 - exp(-8).
    torch.testing.assert_close(contract(out), residual, rtol=0, atol=1e-2)
    torch.testing.assert_close(HyperHead(C, streams)(expand(f, streams)), f, rtol=0, atol=1e-2)
    distinct = torch.randn(5, streams, C)
    h_pre, h_post, h_res = block.mixes(distinct)
    torch.testing.assert_close(h_pre, torch.full((5, streams), 1 / streams), rtol=0, atol=5e-3)
    torch.testing.assert_close(h_post, torch.ones(5, streams), rtol=0, atol=5e-3)
    # exp(-8) for each entry off the diagonal.
    torch.testing.assert_close(h_res, torch.eye(streams).expand(5, -1, -1), rtol=0, atol=2e-3)


def test_deepseek_init_is_that_of_transformers() -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = DeepseekV4Config(hidden_size=64, hc_mult=4, initializer_range=0.05)
    module = theirs.DeepseekV4HyperConnection(config)
    theirs.DeepseekV4PreTrainedModel(config)._init_weights(module)
    own = HyperConnection(nn.Identity(), dim=64, init="deepseek_v4", std=config.initializer_range)
    assert torch.equal(own.scale, module.scale)
    assert torch.equal(own.bias, module.base)
    for phi in (own.phi, module.fn):
        # 24 * 256 samples: the standard error of the standard deviation is 0.9%.
        assert abs(phi.std().item() / 0.05 - 1) < 0.05


def test_extra_arguments_and_results_pass_through() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, factor: float, *, shift: Tensor) -> tuple[Tensor, str]:
            return factor * x + shift, "weights"

    block = HyperConnection(Layer(), dim=C)
    plain = HyperConnection(nn.Identity(), dim=C)
    plain.load_state_dict(block.state_dict())
    x = torch.randn(3, N, C)
    out, rest = block(x, 1.0, shift=torch.zeros(C))
    assert rest == "weights"
    assert torch.equal(out, plain(x))
    assert not torch.equal(block(x, 2.0, shift=torch.ones(C))[0], out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_of_the_streams_is_kept(dtype: torch.dtype) -> None:
    x = torch.randn(3, N, C, dtype=dtype)
    assert HyperConnection(nn.Identity(), dim=C)(x).dtype == dtype
    assert HyperHead(C)(x).dtype == dtype
    assert HyperConnection(nn.Identity(), dim=C).mixes(x)[0].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float64_parameters_take_narrower_streams(dtype: torch.dtype) -> None:
    x = torch.randn(2, N, C, dtype=dtype)
    block = HyperConnection(nn.Identity(), dim=C, streams=N, dtype=torch.float64)
    assert all(gate.dtype is torch.float32 for gate in block.mixes(x))
    for module in (block, HyperHead(C, N, dtype=torch.float64)):
        made = module(x)
        assert made.dtype is dtype
        torch.testing.assert_close(made, module.float()(x))


def test_entry_and_exit() -> None:
    f = torch.randn(2, 3, C)
    x = expand(f, N)
    assert x.is_contiguous()
    assert all(torch.equal(x[:, :, i], f) for i in range(N))
    # The mean of four equal numbers is exact.
    assert torch.equal(contract(x), f)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: HyperConnection(nn.Identity(), dim=0), "dim is 0; expected the width of one stream, >= 1"),
        (lambda: HyperHead(C, 0), "streams is 0; expected a number of streams >= 1"),
        (lambda: HyperHead(C, init="zeros"), "init is 'zeros'; expected one of 'paper', 'deepseek_v4'"),
        (
            lambda: HyperHead(C)(torch.zeros(2, C, N)),
            r"x has shape \[2, 24, 4\]; expected \[..., n, C\] = \[..., 4, 24\]",
        ),
    ],
)
def test_messages(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
