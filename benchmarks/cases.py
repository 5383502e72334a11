"""What is run: chains of hyper-connections in plain eager PyTorch, a block of a DeepSeek-V4, a whole small one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.own_gates import EPS, KINDS
from mhc_compile.testing.float64 import Float64Reference

ITERATIONS = 20
FEW = 1000  # a gradient of fewer numbers is one of few
WORDS = 512
WEIGHTS = 100 << 20  # bytes; an H200 caches 50 MiB

Values = dict[str, Tensor]
Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One program at one size.

    name: "sublayer", "chain" or "long" for `Chain`, "block" and "plain" for `Block`, "model" for `Model`, and the names
    of `MODULES`. modes:
    "forward" (no_grad), "step" (forward and backward), "graph" (forward inside a CUDA graph), "launches" (how many
    kernels a forward is), or alone "first" (a first step in a fresh process) or "process" (a fresh process, from its
    start to the end of that step). options are the backend's, for the providers that take any. No providers: all.
    """

    name: str
    tokens: int
    width: int
    streams: int = 4
    depth: int = 4
    dtype: str = "bfloat16"
    modes: tuple[str, ...] = ("forward", "step")
    providers: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.options.items())
        return f"{self.name} of {self.depth}: {self.tokens} x {self.width}, n={self.streams}, {self.dtype}{options}"

    @property
    def row_bytes(self) -> int:
        """The bytes of one C-unit of every token."""
        return self.tokens * self.width * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        given: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        return cls(**given)


class Connection(nn.Module):
    """A DeepSeek-V4 hyper-connection as its authors write it: reads [batch, tokens, n, C].

    norm: whether its gates are made of normalised streams.
    """

    def __init__(self, streams: int, width: int, norm: bool = True) -> None:
        super().__init__()
        self.norm = norm
        rows = streams * streams + 2 * streams
        self.streams = streams
        # Logits of order 1, so that no gate is saturated and the mixing is far from uniform.
        self.fn = nn.Parameter(torch.randn(rows, streams * width) * (streams * width) ** -0.5)
        self.base = nn.Parameter(torch.randn(rows) * 0.5)
        self.scale = nn.Parameter(torch.rand(3) + 0.5)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre [..., n], h_post [..., n] and h_res [..., n, n]."""
        n = self.streams
        flat = x.flatten(2).float()
        if self.norm:
            flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
        pre_logits, post_logits, res_logits = torch.split(F.linear(flat, self.fn.float()), [n, n, n * n], dim=-1)
        pre_base, post_base, res_base = torch.split(self.base, [n, n, n * n])
        pre_scale, post_scale, res_scale = self.scale.unbind(0)
        pre = torch.sigmoid(pre_logits * pre_scale + pre_base) + EPS
        post = 2 * torch.sigmoid(post_logits * post_scale + post_base)
        res = (
            torch.softmax(res_logits.view(*res_logits.shape[:-1], n, n) * res_scale + res_base.view(n, n), dim=-1) + EPS
        )
        res = res / (res.sum(-2, keepdim=True) + EPS)
        for _ in range(ITERATIONS - 1):
            res = res / (res.sum(-1, keepdim=True) + EPS)
            res = res / (res.sum(-2, keepdim=True) + EPS)
        return pre, post, res

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pre, post, res = self.gates(x)
        return _read(pre, x), post, res


class Chain(nn.Module):
    """Sublayers that hand on what they are given, so that nothing but hyper-connections is measured."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.connections = nn.ModuleList(Connection(case.streams, case.width) for _ in range(case.depth))

    def sublayers(self) -> list[Connection]:
        return [module for module in self.connections if isinstance(module, Connection)]

    def forward(self, x: Tensor) -> Tensor:
        for connection in self.sublayers():
            f, post, res = connection(x)
            x = _written(f, post, res, x)
        return x


class Normed(nn.Module):
    """A connection whose sublayer is an RMS norm with a weight: each sublayer of a model begins with one."""

    def __init__(self, streams: int, width: int) -> None:
        super().__init__()
        self.connection = Connection(streams, width)
        self.norm = nn.RMSNorm(width, EPS)

    def forward(self, x: Tensor) -> Tensor:
        layer_input, post, res = self.connection(x)
        return _written(self.norm(layer_input), post, res, x)


class Unnormed(nn.Module):
    """A connection whose gates are made of the streams as they are."""

    def __init__(self, streams: int, width: int) -> None:
        super().__init__()
        self.connection = Connection(streams, width, norm=False)

    def forward(self, x: Tensor) -> Tensor:
        f, post, res = self.connection(x)
        return _written(f, post, res, x)


class SinglePass(nn.Module):
    """Each sublayer reads with the gates of the connection before, as in DeepSeek-V4.1. The first reads one stream."""

    def __init__(self, case: Case, norm: bool) -> None:
        super().__init__()
        self.connections = nn.ModuleList(Connection(case.streams, case.width) for _ in range(case.depth))
        self.norms = nn.ModuleList(nn.RMSNorm(case.width, EPS) if norm else nn.Identity() for _ in range(case.depth))
        self.register_buffer("first", F.one_hot(torch.tensor(0), case.streams).float())

    def forward(self, x: Tensor) -> Tensor:
        pre: Any = self.first
        for connection, norm in zip(self.connections, self.norms, strict=True):
            following, post, res = connection.gates(x)  # type: ignore[operator]
            x, pre = _written(norm(_read(pre, x)), post, res, x), following
        return _read(pre, x)


class Served(nn.Module):
    """What a GPU does for a token of a large model: between two boundaries, it reads weights. Each has its own phi.

    All sublayers multiply by one matrix. It is larger than the cache, so each of them reads it from memory.
    """

    def __init__(self, case: Case, connected: bool) -> None:
        super().__init__()
        width = case.width
        self.connections = nn.ModuleList(Connection(case.streams, width) for _ in range(case.depth if connected else 0))
        self.norm = nn.RMSNorm(width, EPS)
        rows = max(WEIGHTS // (2 * width), width)
        self.weight = nn.Parameter((torch.randn(rows, width) * width**-0.5).to(case.torch_dtype))
        self.depth = case.depth

    def forward(self, x: Tensor) -> Tensor:
        for connection in self.connections:
            u, post, res = connection(x)
            x = _written(self.sublayer(u), post, res, x)
        if len(self.connections):
            return x.sum(2)
        u = x[:, :, 0]
        for _ in range(self.depth):
            u = self.sublayer(u)
        return u

    def sublayer(self, u: Tensor) -> Tensor:
        # Of each row of results the first C are handed on, and the others change one of them by nothing that shows.
        made = F.linear(self.norm(u), self.weight)
        return made[..., : u.shape[-1]] + made.mean(-1, keepdim=True)


class Sine(nn.Module):
    """What a compiler has the least to do for."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(2 * x)


def _read(pre: Tensor, x: Tensor) -> Tensor:
    return (pre.unsqueeze(-1) * x).sum(2).to(x.dtype)


def _written(f: Tensor, post: Tensor, res: Tensor, x: Tensor) -> Tensor:
    mixed = torch.matmul(res.to(x.dtype).transpose(-1, -2), x)
    return post.to(x.dtype).unsqueeze(-1) * f.unsqueeze(-2) + mixed


class Workload:
    """A case on a device: the module, what it is called with, and the gradient that its output gets."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self.case, self.device = case, device
        torch.manual_seed(seed)
        with device:
            self.module, self.arguments = self.make()
            (argument,) = self.arguments
            self.inputs = {"x": argument} if argument.requires_grad else {}
            self.parameters = dict(self.module.named_parameters())
            with torch.no_grad():
                self.upstream = torch.randn_like(self.module(*self.arguments))

    def make(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        case = self.case
        x = torch.randn(1, case.tokens, case.streams, case.width).to(case.torch_dtype)
        return MODULES.get(case.name, Chain)(case), (x.requires_grad_(),)

    @contextmanager
    def channels_first(self) -> Iterator[None]:
        """The same streams as [.., C, n] in memory for a while: a provider of that layout then needs no copy."""
        arguments, inputs, upstream = self.arguments, self.inputs, self.upstream
        (x,) = arguments
        moved = x.detach().mT.contiguous().mT.requires_grad_()
        self.arguments, self.inputs, self.upstream = (moved,), {"x": moved}, upstream.mT.contiguous().mT
        try:
            yield
        finally:
            self.arguments, self.inputs, self.upstream = arguments, inputs, upstream

    def forward(self, call: Call) -> Tensor:
        with torch.no_grad():
            return call(*self.arguments)

    def step(self, call: Call) -> Values:
        """The output, and the gradient of every leaf that takes part."""
        return _step(call, self.arguments, self.inputs | self.parameters, self.upstream)

    def reference(self) -> Values:
        """`step` in float64, at the full size: chunks of tokens one after another, as tokens do not meet."""
        reference = Float64Reference(self.module)
        parameters = dict(reference.module.named_parameters())
        (x,) = self.arguments
        parts: list[Values] = []
        total: Values = {}
        chunk = max(1, (1 << 27) // (self.case.depth * self.case.streams * self.case.width))
        for xs, upstream in zip(torch.split(x.detach(), chunk, 1), torch.split(self.upstream, chunk, 1), strict=True):
            leaf = xs.double().requires_grad_()
            values = _step(reference, (leaf,), {"x": leaf} | parameters, upstream.double())
            parts.append({name: values.pop(name) for name in ("output", "x")})
            total = {name: value + total.get(name, 0.0) for name, value in values.items()}
        return {name: torch.cat([part[name] for part in parts], 1) for name in ("output", "x")} | total


class Model(Workload):
    """A DeepSeek-V4-Flash of depth / 2 layers with 8 experts and 512 words, up to the last hidden states.

    Attention and experts included: what hyper-connections are part of. Needs the transformers package.
    """

    def build(self) -> Any:
        from benchmarks.deepseek_v4 import SETUPS, build

        case, layers = self.case, max(self.case.depth // 2, 1)
        setup = SETUPS["tiny" if self.device.type == "cpu" else "flash"]
        kinds = ("compressed_sparse_attention", "heavily_compressed_attention")
        model = setup.model | {
            "vocab_size": WORDS,
            "hidden_size": case.width,
            "hc_mult": case.streams,
            "num_hidden_layers": layers,
            "layer_types": [kinds[layer % 2] for layer in range(layers)],
            # By token: a rounding error cannot send a token to another expert.
            "mlp_layer_types": ["hash_moe"] * layers,
            # Every compressed entry is kept, for the same reason.
            "index_topk": max(case.tokens // 4, 1),
        }
        return build(replace(setup, model=model, dtype=case.torch_dtype), self.device, 0).model

    def make(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return _Hidden(self.build()), (self.words(),)

    def words(self) -> Tensor:
        return torch.randint(0, WORDS, (1, self.case.tokens), device=self.device)

    def reference(self) -> Values:
        """`step` in float64 at the full size."""
        reference = Float64Reference(self.module)
        model: Any = reference.module.model
        # The loop over experts takes any dtype, the grouped product not.
        model.set_experts_implementation("eager")
        arguments = tuple(a.detach().double().requires_grad_() if a.is_floating_point() else a for a in self.arguments)
        leaves = dict.fromkeys(self.inputs, arguments[0]) | dict(reference.module.named_parameters())
        return _step(reference, arguments, leaves, self.upstream.double())


class Block(Model):
    """That model's decoder layers alone: streams in, streams out. As a case "plain", with plain residuals."""

    def make(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        case = self.case
        plain = case.name == "plain"
        x = torch.randn(1, case.tokens, *(() if plain else (case.streams,)), case.width, device=self.device)
        return _Layers(self.build(), self.words(), plain), (x.to(case.torch_dtype).requires_grad_(),)


class _Hidden(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden


class _Layers(nn.Module):
    """The layers of a model, called as the model calls them."""

    def __init__(self, model: Any, words: Tensor, plain: bool) -> None:
        from benchmarks.deepseek_v4 import ResidualLayer

        super().__init__()
        # What layers do not use has no gradient, and no place among the leaves.
        model.embed_tokens = model.norm = model.hc_head = None
        if plain:
            model.layers = nn.ModuleList(ResidualLayer(layer) for layer in model.layers)
        self.model, self.plain = model, plain
        self.register_buffer("words", words)

    def forward(self, x: Tensor) -> Tensor:
        from transformers.masking_utils import create_sliding_window_causal_mask

        like = x if self.plain else x[:, :, 0]
        at = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        about = {
            "position_ids": at,
            "position_embeddings": {
                kind: self.model.rotary_emb(like, position_ids=at, layer_type=kind) for kind in ("main", "compress")
            },
            "attention_mask": create_sliding_window_causal_mask(
                config=self.model.config, inputs_embeds=like, attention_mask=None, past_key_values=None, position_ids=at
            ),
            "past_key_values": None,
        }
        for layer in self.model.layers:
            x = layer(x, input_ids=self.words, **about)
        return x


def _layers(kind: Callable[[int, int], nn.Module], case: Case) -> nn.Module:
    """A chain of modules from streams to streams."""
    return nn.Sequential(*(kind(case.streams, case.width) for _ in range(case.depth)))


MODULES: dict[str, Callable[[Case], nn.Module]] = {
    name: partial(_layers, kind) for name, kind in (KINDS | {"normed": Normed, "unnormed": Unnormed}).items()
}
MODULES |= {
    "single-pass": partial(SinglePass, norm=False),
    "single-pass-normed": partial(SinglePass, norm=True),
    "served": partial(Served, connected=True),
    "served-alone": partial(Served, connected=False),
    "sine": lambda case: Sine(),
}
WORKLOADS: dict[str, type[Workload]] = {"model": Model, "block": Block, "plain": Block}


def workload(case: Case, device: torch.device) -> Workload:
    """The tensors and the module of a case."""
    return WORKLOADS.get(case.name, Workload)(case, device)


def _step(call: Call, arguments: tuple[Tensor, ...], leaves: Values, upstream: Tensor) -> Values:
    output = call(*arguments)
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream, allow_unused=True)
    named = zip(leaves, gradients, strict=True)
    return {"output": output.detach()} | {name: gradient for name, gradient in named if gradient is not None}


def errors(values: Values, reference: Values) -> dict[str, float]:
    """The norm of each difference relative to that of the reference; infinite for what is missing.

    Gradients of few numbers that bear one name are taken together ("*.scale"). A scale has three: by chance they may
    all be small in one sublayer, and any rounding is then large compared with them.
    """
    squares: dict[str, list[float]] = {}
    for name, expected in reference.items():
        group = name if expected.numel() >= FEW or "." not in name else "*." + name.rsplit(".", 1)[1]
        if name in values and values[name].shape == expected.shape:
            difference = (values[name].double() - expected).square().sum().item()
        else:
            difference = math.inf
        total = squares.setdefault(group, [0.0, 0.0])
        total[0] += difference
        total[1] += expected.square().sum().item()
    # What is exactly zero has no relative error: there the difference itself is taken.
    return {
        group: math.sqrt(difference / norm if norm else difference) for group, (difference, norm) in squares.items()
    }


def complaints(found: dict[str, float], of_eager: dict[str, float], dtype: torch.dtype) -> list[str]:
    """What is too far from float64, as sentences.

    Allowed is four times what eager's error is there or usually is, whichever is larger, as both are sums of
    roundings and that of few numbers is little averaged; and in any case the rounding of the streams themselves. A
    program that computes something else is off by a tenth and more.
    """
    usual = statistics.median(of_eager.values())
    result = []
    for name, error in found.items():
        limit = max(4 * max(of_eager[name], usual), torch.finfo(dtype).eps)
        if not error <= limit:  # so that NaN is one too
            result.append(f"{name} is {error:.1e} from float64, allowed {limit:.1e}")
    return result
