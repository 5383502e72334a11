"""Hyper-connections as ordinary eager modules, which the passes rewrite like other code.

    stack = [HyperConnection(layer, dim=1280) for layer in layers]
    x = expand(embedding, 4)
    for block in stack:
        x = block(x)
    out = HyperHead(1280)(x)        # or contract(x)

There is no operator of ours in here: uncompiled, this is plain PyTorch on any device.
`mhc_compile.checkpoints` brings the parameters of other libraries into these modules and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mhc_compile.forms import Gates, Rms, Sinkhorn

__all__ = ["Form", "HyperConnection", "HyperHead", "contract", "expand"]

INITS = ("paper", "deepseek_v4")

# At initialisation a stream keeps all but a fraction n * exp(-8) of itself.
_PAPER_OFF_DIAGONAL = -8.0
_PAPER_ALPHA = 0.01


@dataclass(frozen=True)
class Form:
    """Which of the published hyper-connections a module computes.

    transposed says how h_res is applied: x'[o] = sum_i h_res[i, o] * x[i] if it is true, as in DeepSeek-V4,
    otherwise x'[o] = sum_i h_res[o, i] * x[i].

    The default is DeepSeek-V4's. Every other combination of `mhc_compile.forms` is possible as well.
    """

    rms: Rms = field(default_factory=Rms)
    gates: Gates = field(default_factory=lambda: Gates(pre_eps=1e-6))
    sinkhorn: Sinkhorn = field(default_factory=Sinkhorn)
    transposed: bool = True

    @classmethod
    def deepseek_v4(
        cls, *, iterations: int = 20, eps: float = 1e-6, norm_eps: float = 1e-6, post_mult: float = 2.0
    ) -> Form:
        """Row softmax plus eps, columns first; `hc_sinkhorn_iters`, `hc_eps`, `rms_norm_eps` of its config."""
        return cls(Rms(norm_eps), Gates(eps, post_mult), Sinkhorn(2 * iterations - 1, eps=eps, start_eps=eps), True)

    @classmethod
    def transformer_engine(cls, *, iterations: int = 20) -> Form:
        """Sinkhorn on log potentials, rows first, without eps; nothing else is configurable there."""
        sinkhorn = Sinkhorn(2 * iterations, "exp", "rows", eps=0.0, start_eps=0.0)
        return cls(Rms(torch.finfo(torch.float32).eps), Gates(), sinkhorn, True)

    @classmethod
    def liger(
        cls,
        *,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
    ) -> Form:
        """DeepSeek's Sinkhorn, h_res applied as it is; the arguments of `LigerMHC`."""
        sinkhorn = Sinkhorn(2 * tmax - 1, eps=sinkhorn_eps, start_eps=sinkhorn_eps)
        return cls(Rms(rms_eps), Gates(pre_eps, post_mult), sinkhorn, False)

    @classmethod
    def megatron(cls, *, iterations: int = 20, eps: float = 1e-6, softmax: bool = False) -> Form:
        """Megatron-LM's `HyperConnectionModule`.

        softmax chooses one of its two versions: without it, exp with clamped sums, rows first, h_res applied as it is;
        with, DeepSeek's Sinkhorn, h_res transposed and eps added to h_pre.
        """
        rms = Rms(eps, "outside")
        if softmax:
            return cls(rms, Gates(eps), Sinkhorn(2 * iterations - 1, eps=eps, start_eps=eps), True)
        return cls(rms, Gates(), Sinkhorn(2 * iterations, "exp", "rows", eps, 0.0, True), False)


def expand(x: Tensor, streams: int) -> Tensor:
    """The entry: [..., C] to `streams` equal streams [..., n, C]."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], streams, x.shape[-1]).contiguous()


def contract(x: Tensor) -> Tensor:
    """The exit without gates: the mean of the streams, [..., n, C] to [..., C]."""
    return x.mean(-2)


class _Mix(nn.Module):
    """The learned projection from the streams of a token to its gates.

    phi [K, n*C], scale [groups], bias [K]; K = n for one group, n*n + 2*n for three.
    """

    def __init__(
        self,
        dim: int,
        streams: int,
        groups: int,
        form: Form,
        init: str,
        std: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"dim is {dim}; expected the width of one stream, >= 1")
        if streams < 1:
            raise ValueError(f"streams is {streams}; expected a number of streams >= 1")
        if init not in INITS:
            raise ValueError(f"init is {init!r}; expected one of {', '.join(map(repr, INITS))}")
        self.dim, self.streams, self.form, self.init, self.std = dim, streams, form, init, std
        k = streams if groups == 1 else streams * streams + 2 * streams
        self.phi = nn.Parameter(torch.empty(k, streams * dim, device=device, dtype=dtype))
        self.scale = nn.Parameter(torch.empty(groups, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(k, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `init` says; see `HyperConnection`."""
        with torch.no_grad():
            self.phi.normal_(0.0, self.std)
            self.bias.zero_()
            if self.init == "deepseek_v4":
                self.scale.fill_(1.0)
                return
            n = self.streams
            self.scale.fill_(_PAPER_ALPHA)
            # sigmoid gives 1/n; one stream would need an infinite logit, and gets 1 - exp(-8).
            self.bias[:n] = -math.log(n - 1) if n > 1 else -_PAPER_OFF_DIAGONAL
            if len(self.scale) == 3:
                off_diagonal = 1 - torch.eye(n, device=self.bias.device, dtype=self.bias.dtype)
                self.bias[2 * n :] = (_PAPER_OFF_DIAGONAL * off_diagonal).flatten()

    def extra_repr(self) -> str:
        return f"dim={self.dim}, streams={self.streams}, {self.form}"

    def _projected(self, x: Tensor) -> Tensor:
        """The normalised projection [..., K] in float32."""
        if x.shape[-2:] != (self.streams, self.dim):
            raise ValueError(f"x has shape {list(x.shape)}; expected [..., n, C] = [..., {self.streams}, {self.dim}]")
        flat = _wide(x.flatten(-2))
        # A float64 x makes everything float64; otherwise the product is one of float32.
        return F.linear(flat * _rms_factor(flat, self.form.rms), self.phi.to(flat.dtype))


class HyperConnection(_Mix):
    """A layer among hyper-connected streams: reads a mix of them, and adds its output to a mix of them.

        l = scale * (r * phi @ x.flatten()) + bias             r, gates and sinkhorn as `form` says
        h_pre = sigmoid(l[:n]) + pre_eps;  h_post = post_mult * sigmoid(l[n:2n]) + post_eps
        h_res = sinkhorn(l[2n:] as [n, n])
        x'[o] = h_post[o] * layer(sum_i h_pre[i] * x[i]) + sum_i h_res[i, o] * x[i]

    Args:
        layer: any callable module from [..., C] to [..., C], its own normalisation included.
        dim: C, the width of one stream.
        streams: n.
        form: which of the published variants; DeepSeek-V4's if not given.
        init: "paper": phi normal(0, std), scale 0.01, and biases that make the module a pre-norm residual
            block, up to terms of the size of scale and exp(-8): h_pre 1/n, h_post post_mult / 2, h_res the identity.
            (The paper states its goal, the identity mapping, and the small scale; these biases are ours.)
            "deepseek_v4": phi normal(0, std), bias 0, scale 1, as transformers initialises that model.
        std: the standard deviation of phi; `initializer_range` of a transformers config.

    Gates are computed in float32 (float64 for float64 x), whatever the dtypes. Autocast rounds the product with phi.

    `forward(x, *args, **kwargs)` takes x [..., n, C] and returns x' of the same shape and dtype; the other
    arguments go to the layer. A layer that returns a tuple gives its output first: the result is then a tuple of
    x' and the rest.

    Raises:
        ValueError: an argument is out of range, or x is not [..., n, C].

    Source: arXiv 2512.24880, equations 3, 7 and 8.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        dim: int,
        streams: int = 4,
        form: Form = Form(),
        init: str = "paper",
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, streams, 3, form, init, std, device, dtype)
        self.layer = layer

    def mixes(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre [..., n], h_post [..., n] and h_res [..., n, n] for x [..., n, C]."""
        n, gates = self.streams, self.form.gates
        pre, post, res = torch.split(projected := self._projected(x), [n, n, n * n], dim=-1)
        pre_bias, post_bias, res_bias = torch.split(_no_wider(self.bias, projected), [n, n, n * n])
        pre_scale, post_scale, res_scale = _no_wider(self.scale, projected).unbind()
        h_pre = _shifted(torch.sigmoid(pre * pre_scale + pre_bias), gates.pre_eps)
        h_post = _shifted(gates.post_mult * torch.sigmoid(post * post_scale + post_bias), gates.post_eps)
        logits = torch.unflatten(res * res_scale + res_bias, -1, (n, n))
        return h_pre, h_post, self.form.sinkhorn.equation(logits)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        h_pre, h_post, h_res = self.mixes(x)
        result = self.layer((h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype), *args, **kwargs)
        f, rest = (result[0], tuple(result[1:])) if isinstance(result, tuple) else (result, None)
        weights = h_res.transpose(-1, -2) if self.form.transposed else h_res
        mixed = torch.matmul(weights, _wide(x))
        x_new = (h_post.unsqueeze(-1) * f.unsqueeze(-2) + mixed).to(x.dtype)
        return x_new if rest is None else (x_new, *rest)


class HyperHead(_Mix):
    """The learned exit from the streams: out = sum_i h_pre[i] * x[i], [..., n, C] to [..., C].

    h_pre is that of `HyperConnection`, with a projection of its own; arguments and init are as there.

    Source: arXiv 2512.24880, the pre part of equations 7 and 8; DeepSeek-V4 models end with it.
    """

    def __init__(
        self,
        dim: int,
        streams: int = 4,
        *,
        form: Form = Form(),
        init: str = "paper",
        std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, streams, 1, form, init, std, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid((h := self._projected(x)) * _no_wider(self.scale, h) + _no_wider(self.bias, h))
        h_pre = _shifted(gate, self.form.gates.pre_eps)
        return (h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def _no_wider(parameter: Tensor, projected: Tensor) -> Tensor:
    """A float64 parameter in float32, where the projection is not in float64."""
    return parameter.float() if parameter.dtype == torch.float64 != projected.dtype else parameter


def _shifted(value: Tensor, eps: float) -> Tensor:
    return value + eps if eps else value


def _rms_factor(flat: Tensor, rms: Rms) -> Tensor | float:
    if rms.mode == "none":
        return 1.0
    ms = flat.square().mean(-1, keepdim=True)
    if rms.mode == "inside":
        return torch.rsqrt(ms + rms.eps)
    root = torch.sqrt(ms)
    return (root + rms.eps if rms.mode == "outside" else root.clamp_min(rms.eps)).reciprocal()
