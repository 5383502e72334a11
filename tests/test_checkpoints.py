"""Checkpoints of other libraries: the moved parameters compute what that library computes with its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile import checkpoints
from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.nn import Form, HyperConnection, HyperHead

N, C, K = 4, 7, 24
State = Mapping[str, Tensor]

# Everything here is float64; the two sides differ in the order of some hundred roundings.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _softmax_sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    p = logits.softmax(-1) + eps
    p = p / (p.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        p = p / (p.sum(-1, keepdim=True) + eps)
        p = p / (p.sum(-2, keepdim=True) + eps)
    return p


def _layer(x: Tensor) -> Tensor:
    return torch.tanh(1.5 * x) - 0.25


class _Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _layer(x)


def liger(x: Tensor, state: State, *, tmax: int = 20, eps: float = 1e-6, pre_eps: float = 0.0) -> Tensor:
    """LigerMHC's reference: phi [n*C, K], scalar alphas, h_res applied as it is."""
    flat = x.flatten(-2)
    mix = (flat @ state["phi"]) * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + 1e-6)
    b = state["b"]
    h_pre = torch.sigmoid(mix[..., :N] * state["alpha_pre"] + b[:N]) + pre_eps
    h_post = torch.sigmoid(mix[..., N : 2 * N] * state["alpha_post"] + b[N : 2 * N]) * 2
    logits = mix[..., 2 * N :] * state["alpha_res"] + b[2 * N :]
    h_res = _softmax_sinkhorn(logits.unflatten(-1, (N, N)), tmax, eps)
    f = _layer((x * h_pre.unsqueeze(-1)).sum(-2))
    return torch.einsum("...oi,...ic->...oc", h_res, x) + h_post.unsqueeze(-1) * f.unsqueeze(-2)


def transformer_engine(x: Tensor, state: State) -> Tensor:
    """TransformerEngine's reference, on streams [..., C, n]; phi may have rows of padding."""
    eps = torch.finfo(torch.float32).eps
    flat = x.flatten(-2)
    h = flat * state["norm_weight"] if "norm_weight" in state else flat
    h = (h @ state["phi"][:K].T) / torch.sqrt(flat.pow(2).mean(-1, keepdim=True) + eps)
    alpha, beta = state["alpha"], state["beta"]
    h_pre = torch.sigmoid(h[..., :N] * alpha[0] + beta[0, :N])
    h_post = 2 * torch.sigmoid(h[..., N : 2 * N] * alpha[1] + beta[0, N : 2 * N])
    logits = (h[..., 2 * N :] * alpha[2] + beta[0, 2 * N :]).unflatten(-1, (N, N))
    u = torch.zeros_like(logits[..., 0])
    v = torch.zeros_like(u)
    for _ in range(20):
        u = -torch.logsumexp(logits + v.unsqueeze(-2), -1)
        v = -torch.logsumexp(logits + u.unsqueeze(-1), -2)
    h_res = torch.exp(logits + u.unsqueeze(-1) + v.unsqueeze(-2))
    f = _layer((x @ h_pre.unsqueeze(-1)).squeeze(-1))
    return f.unsqueeze(-1) @ h_post.unsqueeze(-2) + x @ h_res


def megatron(x: Tensor, state: State, *, softmax: bool) -> Tensor:
    """HyperConnectionModule's eager path on [..., n*C]: exp, clamped and as it is, or softmax, eps and transposed."""
    r = 1 / (x.norm(dim=-1, keepdim=True) / math.sqrt(N * C) + 1e-6)
    alpha = torch.cat([state[f"alpha_{g}"].expand(m) for g, m in (("pre", N), ("post", N), ("res", N * N))])
    h = r * F.linear(x, state["mapping_proj.weight"]) * alpha + state["bias"]
    h_pre, h_post = h[..., :N].sigmoid(), 2 * h[..., N : 2 * N].sigmoid()
    logits = h[..., 2 * N :].view(*x.shape[:-1], N, N)
    streams = x.view(*x.shape[:-1], N, C)
    if softmax:
        h_pre = h_pre + 1e-6
        mixed = _softmax_sinkhorn(logits, 20, 1e-6).mT @ streams
    else:
        p = torch.exp(logits - logits.max(-1, keepdim=True).values)
        for _ in range(20):
            p = p / p.sum(-1, keepdim=True).clamp(min=1e-6)
            p = p / p.sum(-2, keepdim=True).clamp(min=1e-6)
        mixed = p @ streams
    f = _layer((streams * h_pre.unsqueeze(-1)).sum(-2))
    return (mixed + h_post.unsqueeze(-1) * f.unsqueeze(-2)).flatten(-2)


def liger_state() -> dict[str, Tensor]:
    alphas = {f"alpha_{group}": _random().exp() for group in ("pre", "post", "res")}
    return {"phi": _random(N * C, K), "b": _random(K)} | alphas


def transformer_engine_state(rows: int = K, norm_weight: bool = False) -> dict[str, Tensor]:
    phi = torch.full((rows, N * C), torch.nan, dtype=torch.float64)
    phi[:K] = _random(K, N * C)
    state = {"phi": phi, "alpha": _random(3).exp(), "beta": _random(1, K)}
    return state | ({"norm_weight": _random(N * C)} if norm_weight else {})


def megatron_state() -> dict[str, Tensor]:
    alphas = {f"alpha_{group}": _random(1).exp() for group in ("pre", "post", "res")}
    return {"mapping_proj.weight": _random(K, N * C), "bias": _random(K)} | alphas


def own(parameters: State, form: Form) -> HyperConnection:
    block = HyperConnection(_Layer(), dim=C, streams=N, form=form, dtype=torch.float64)
    block.load_state_dict(dict(parameters))
    return block


def _hf() -> tuple[Any, Any]:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    return DeepseekV4Config(hidden_size=C, hc_mult=N, hc_eps=1e-4, rms_norm_eps=1e-5, hc_sinkhorn_iters=7), theirs


def _fill(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()


def test_deepseek_v4() -> None:
    """Against transformers' own module, whose casts make it float32."""
    config, theirs = _hf()
    module = theirs.DeepseekV4HyperConnection(config)
    _fill(module)
    form = Form.deepseek_v4(iterations=7, eps=1e-4, norm_eps=1e-5)
    state = {f"attn_hc.{name}": value for name, value in module.state_dict().items()}
    block = HyperConnection(_Layer(), dim=C, streams=N, form=form)
    block.load_state_dict(checkpoints.from_deepseek_v4(state, "attn_hc."))
    x = torch.randn(2, 3, N, C)
    post, comb, collapsed = module(x)
    expected = post.unsqueeze(-1) * _layer(collapsed).unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x)
    # Both compute in float32, in nearly the same order; logits are of order 10.
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
    back = checkpoints.to_deepseek_v4(block.state_dict(), form, "attn_hc.")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_deepseek_v4_head() -> None:
    config, theirs = _hf()
    module = theirs.DeepseekV4HyperHead(config)
    _fill(module)
    form = Form.deepseek_v4(eps=1e-4, norm_eps=1e-5)
    head = HyperHead(C, N, form=form)
    head.load_state_dict(checkpoints.from_deepseek_v4_head(module.state_dict()))
    x = torch.randn(2, 3, N, C)
    # As above.
    torch.testing.assert_close(head(x), module(x), rtol=1e-5, atol=1e-5)
    module.load_state_dict(checkpoints.to_deepseek_v4_head(head.state_dict(), form))
    torch.testing.assert_close(head(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "norm_weight"), [(K, False), (32, False), (K, True)])
def test_transformer_engine(rows: int, norm_weight: bool) -> None:
    state, form = transformer_engine_state(rows, norm_weight), Form.transformer_engine()
    block = own(checkpoints.from_transformer_engine(state), form)
    x = _random(3, 2, N, C)
    expected = transformer_engine(x.mT.contiguous(), state).mT
    torch.testing.assert_close(block(x), expected, **CLOSE)
    back = checkpoints.to_transformer_engine(block.state_dict(), form)
    torch.testing.assert_close(transformer_engine(x.mT.contiguous(), back).mT, expected, **CLOSE)
    if rows == K and not norm_weight:
        assert all(torch.equal(back[name], state[name]) for name in state)


def test_liger() -> None:
    state, form = liger_state(), Form.liger(tmax=5, sinkhorn_eps=1e-3, pre_eps=1e-2)
    block = own(checkpoints.from_liger({f"mhc.{k}": v for k, v in state.items()}, "mhc."), form)
    x = _random(3, 2, N, C)
    torch.testing.assert_close(block(x), liger(x, state, tmax=5, eps=1e-3, pre_eps=1e-2), **CLOSE)
    back = checkpoints.to_liger(block.state_dict(), form)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("softmax", [False, True])
def test_megatron(softmax: bool) -> None:
    state, form = megatron_state(), Form.megatron(softmax=softmax)
    block = own(checkpoints.from_megatron(state), form)
    x = _random(3, 2, N, C)
    torch.testing.assert_close(block(x).flatten(-2), megatron(x.flatten(-2), state, softmax=softmax), **CLOSE)
    back = checkpoints.to_megatron(block.state_dict(), form, softmax=softmax)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_megatron_head() -> None:
    state = {"hc_head_fn": _random(N, N * C), "hc_head_base": _random(N), "hc_head_scale": _random(1)}
    form = Form(Rms(1e-5), Gates(pre_eps=1e-5))
    head = HyperHead(C, N, form=form, dtype=torch.float64)
    head.load_state_dict(checkpoints.from_megatron_head(state))
    x = _random(3, 2, N * C)
    mixes = F.linear(x, state["hc_head_fn"]) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    pre = torch.sigmoid(mixes * state["hc_head_scale"] + state["hc_head_base"]) + 1e-5
    expected = (pre.unsqueeze(-1) * x.unflatten(-1, (N, C))).sum(-2)
    torch.testing.assert_close(head(x.unflatten(-1, (N, C))), expected, **CLOSE)
    back = checkpoints.to_megatron_head(head.state_dict(), form)
    assert all(torch.equal(back[name], state[name]) for name in state)


TRANSPOSABLE = {
    "megatron": Form.megatron(),
    "transformer_engine": Form.transformer_engine(),
    "columns first, eps": Form(sinkhorn=Sinkhorn(5, "exp", "columns", 1e-2, 1e-3)),
    "log softmax": Form.liger(sinkhorn_eps=0.0),
    "log softmax, rows first": Form(sinkhorn=Sinkhorn(3, "softmax", "rows", 0.0, 0.0)),
    "log softmax alone": Form(sinkhorn=Sinkhorn(0, "softmax", "columns", 0.0, 0.0)),
    "log clamp": Form(sinkhorn=Sinkhorn(3, "exp", "columns", 0.0, 0.0, clamp=True)),
    **{
        f"{start}, {steps} half-steps, eps {eps}": Form(sinkhorn=Sinkhorn(steps, start, "rows", eps, eps))
        for start in ("exp", "plain_exp", "global_exp")
        for steps in (0, 3)
        for eps in (0.0, 1e-2)
    },
}


@pytest.mark.parametrize("name", TRANSPOSABLE)
def test_transposing_both_res_and_its_application_changes_nothing(name: str) -> None:
    form = TRANSPOSABLE[name]
    state = checkpoints.from_megatron(megatron_state())
    moved, turned = checkpoints.transpose_res(state, form)
    assert turned.transposed is not form.transposed
    x = _random(3, 2, N, C)
    torch.testing.assert_close(own(moved, turned)(x), own(state, form)(x), **CLOSE)
    # Neither half of the exchange is right without the other.
    for parameters, wrong in ((state, turned), (moved, form)):
        assert (own(parameters, wrong)(x) - own(state, form)(x)).abs().max() > 1e-2


def test_softmax_with_eps_has_no_transposed_form() -> None:
    state = checkpoints.from_liger(liger_state())
    with pytest.raises(ValueError, match=r"expected another start, or eps = start_eps = 0"):
        checkpoints.transpose_res(state, Form.liger())


def test_without_eps_liger_moves_to_transformer_engine() -> None:
    """Liger without eps is TransformerEngine's form, transposed: columns last there means rows last here."""
    state = liger_state()
    eps = torch.finfo(torch.float32).eps
    form = Form.liger(sinkhorn_eps=0.0, rms_eps=eps)
    with pytest.raises(ValueError, match="TransformerEngine computes"):
        checkpoints.to_transformer_engine(checkpoints.from_liger(state), form)
    rows_last = Form(Rms(eps), Gates(), Sinkhorn(40, "exp", "columns", 0.0, 0.0), transposed=False)
    moved = checkpoints.to_transformer_engine(checkpoints.from_liger(state), rows_last)
    x = _random(3, 2, N, C)
    expected = own(checkpoints.from_liger(state), rows_last)(x)
    torch.testing.assert_close(transformer_engine(x.mT.contiguous(), moved).mT, expected, **CLOSE)


Move = Callable[[dict[str, Tensor], Form], Any]


@pytest.mark.parametrize(
    ("move", "form", "library"),
    [
        (checkpoints.to_deepseek_v4, Form.liger(), "DeepSeek-V4"),
        (checkpoints.to_deepseek_v4, Form.deepseek_v4(post_mult=1.0), "DeepSeek-V4"),
        (checkpoints.to_deepseek_v4, Form.megatron(softmax=True), "DeepSeek-V4"),
        (checkpoints.to_liger, Form.deepseek_v4(), "Liger"),
        (checkpoints.to_liger, Form.megatron(), "Liger"),
        (checkpoints.to_transformer_engine, Form.deepseek_v4(eps=0.0), "TransformerEngine"),
        (checkpoints.to_transformer_engine, Form.megatron(), "TransformerEngine"),
        (checkpoints.to_megatron, Form.megatron(softmax=True), "Megatron-LM"),
        (checkpoints.to_megatron, Form.deepseek_v4(), "Megatron-LM"),
        (
            checkpoints.to_transformer_engine,
            replace(Form.transformer_engine(), sinkhorn=Sinkhorn(0, "plain_exp", "rows", 0.0, 0.0)),
            "TransformerEngine",
        ),
        (checkpoints.to_deepseek_v4_head, Form.megatron(), "a head of DeepSeek-V4"),
        (checkpoints.to_megatron_head, Form.liger(), "a head of Megatron-LM"),
    ],
)
def test_forms_that_a_library_does_not_compute_are_refused(move: Move, form: Form, library: str) -> None:
    state = checkpoints.from_megatron(megatron_state())
    with pytest.raises(ValueError, match=f"form is Form.*{library}"):
        move(state, form)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: checkpoints.from_deepseek_v4({"x.fn": _random(1)}, "x."),
            KeyError,
            "x.base is missing; state has x.fn",
        ),
        (
            lambda: checkpoints.from_megatron(megatron_state() | {"bias": _random(23)}, ""),
            ValueError,
            r"bias has shape \[23\]; expected n\*n \+ 2\*n elements",
        ),
        (
            lambda: checkpoints.from_liger(liger_state() | {"phi": _random(K, N * C + 1)}),
            ValueError,
            r"phi has, as \[K, n\*C\], shape \[29, 24\]; expected K = 24 and n = 4",
        ),
        (
            lambda: checkpoints.from_transformer_engine(transformer_engine_state() | {"alpha": _random(2)}),
            ValueError,
            r"alpha has shape \[2\]; expected \[3\]",
        ),
        (
            lambda: checkpoints.from_transformer_engine(transformer_engine_state() | {"phi": _random(K, 29)}),
            ValueError,
            r"phi has shape \[24, 29\]; expected \[K, C\*n\] with n = 4",
        ),
        (
            lambda: checkpoints.from_deepseek_v4_head(
                {"hc_fn": _random(4, 24), "hc_base": _random(5), "hc_scale": _random(1)}
            ),
            ValueError,
            r"hc_fn has shape \[4, 24\] and hc_base \[5\]; expected \[n, n\*C\] and \[n\]",
        ),
        (
            lambda: checkpoints.to_liger({"phi": _random(1)}, Form.liger()),
            KeyError,
            "scale is missing; state has phi",
        ),
    ],
)
def test_messages(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
