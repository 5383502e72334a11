"""Parameters of hyper-connections, from other libraries' layouts to that of `mhc_compile.nn` and back.

    block = HyperConnection(layer, dim=4096, form=Form.deepseek_v4())
    block.load_state_dict(from_deepseek_v4(state, prefix="model.layers.0.attn_hc."), strict=False)

`from_*` take a library's state dict and give phi, scale and bias; strict=False leaves the wrapped layer's own
parameters alone. `to_*` go the other way and need the `Form` that the parameters belong to: they raise where the
library computes another one, rather than give a checkpoint that loads and is wrong.

What can be moved exactly: the order of phi's columns, the packing of scales and the shapes are conventions. Whether
h_res is applied as it is or transposed is more than that: exchanging rows and columns of the logits transposes h_res
only if Sinkhorn exchanges them as well. That turns "rows first" into "columns first". Forms that start from an exp can
be either, and so can forms without eps. A softmax start with eps is one over rows, always.
`transpose_res` does it, and `to_*` apply it where it makes a form fit.

The names of parameters are those of `DeepseekV4HyperConnection` and `DeepseekV4HyperHead` in transformers 5.17,
`LigerMHC` in Liger-Kernel (transformers/mhc.py) and `HyperConnectionModule` in Megatron-LM
(core/transformer/hyper_connection.py, where the head is a function: its parameters are the decoder's own).
TransformerEngine has functions only (`mhc_generate_mix_and_aggregate` of pytorch/triton/mhc.py), so its names here are
those of their arguments; DeepSeek's TileKernels as well, and take phi, scale and bias in the layout of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isqrt

import torch
from torch import Tensor

from mhc_compile.forms import Sinkhorn
from mhc_compile.nn import Form

__all__ = [
    "from_deepseek_v4",
    "from_deepseek_v4_head",
    "from_liger",
    "from_megatron",
    "from_megatron_head",
    "from_transformer_engine",
    "to_deepseek_v4",
    "to_deepseek_v4_head",
    "to_liger",
    "to_megatron",
    "to_megatron_head",
    "to_transformer_engine",
    "transpose_res",
]

State = Mapping[str, Tensor]
_GROUPS = ("pre", "post", "res")


def from_deepseek_v4(state: State, prefix: str = "") -> dict[str, Tensor]:
    """`fn` [K, n*C], `base` [K], `scale` [3]; belongs to `Form.deepseek_v4`.

    Raises KeyError for a missing parameter, ValueError for one of an unexpected shape; so do all functions here.
    """
    fn, base, scale = _take(state, prefix, "fn", "base", "scale")
    return _own(fn, scale, base, (prefix + "fn", prefix + "scale", prefix + "base"))


def to_deepseek_v4(state: State, form: Form, prefix: str = "") -> dict[str, Tensor]:
    """Set `hc_sinkhorn_iters`, `hc_eps` and `rms_norm_eps` of the config to the values of form.

    Raises ValueError if DeepSeek-V4 does not compute form; so do all `to_*`.
    """
    state = _fitted(
        state,
        form,
        lambda f: Form.deepseek_v4(iterations=_iterations(f), eps=f.sinkhorn.eps, norm_eps=f.rms.eps),
        "DeepSeek-V4",
    )
    return {prefix + "fn": state["phi"], prefix + "base": state["bias"], prefix + "scale": state["scale"]}


def from_deepseek_v4_head(state: State, prefix: str = "") -> dict[str, Tensor]:
    """`hc_fn` [n, n*C], `hc_base` [n], `hc_scale` [1], for `HyperHead` with `Form.deepseek_v4`."""
    return _head(state, prefix, "hc_fn", "hc_scale", "hc_base")


def to_deepseek_v4_head(state: State, form: Form, prefix: str = "") -> dict[str, Tensor]:
    """Set `hc_eps` and `rms_norm_eps` of the config to the values of form."""
    _fitting_head(form, replace(form.rms, mode="inside") == form.rms, "DeepSeek-V4", "rms.mode 'inside'")
    return {
        prefix + "hc_fn": state["phi"],
        prefix + "hc_base": state["bias"],
        prefix + "hc_scale": state["scale"],
    }


def from_transformer_engine(state: State, prefix: str = "") -> dict[str, Tensor]:
    """`phi` [K, C*n] or padded to more rows, `alpha` [3], `beta` [1, K], `norm_weight` [C*n] if there is one.

    Belongs to `Form.transformer_engine`. Streams there are [s, b, C, n], so column c*n + i of phi becomes column
    i*C + c. norm_weight is folded into phi, in phi's dtype.
    """
    phi, alpha, beta = _take(state, prefix, "phi", "alpha", "beta")
    norm_weight = state.get(prefix + "norm_weight")
    if norm_weight is not None:
        phi = phi * norm_weight.to(phi.dtype)
    bias = beta.reshape(-1)
    n = _streams(bias, prefix + "beta")
    phi = phi[: len(bias)]
    if phi.dim() != 2 or phi.shape[1] % n:
        raise ValueError(f"{prefix}phi has shape {list(phi.shape)}; expected [K, C*n] with n = {n}")
    columns = torch.unflatten(phi, 1, (-1, n)).transpose(1, 2).flatten(1)
    return _own(columns, alpha, bias, (prefix + "phi", prefix + "alpha", prefix + "beta"))


def to_transformer_engine(state: State, form: Form, prefix: str = "") -> dict[str, Tensor]:
    """Set iters of `mhc_fused_sinkhorn` to that of form (`mhc_generate_mix_and_aggregate` has 20)."""
    state = _fitted(state, form, lambda f: Form.transformer_engine(iterations=_iterations(f)), "TransformerEngine")
    n = _streams(state["bias"], "bias")
    return {
        prefix + "phi": torch.unflatten(state["phi"], 1, (n, -1)).transpose(1, 2).flatten(1),
        prefix + "alpha": state["scale"],
        prefix + "beta": state["bias"].unsqueeze(0),
    }


def from_liger(state: State, prefix: str = "") -> dict[str, Tensor]:
    """`phi` [n*C, K], `b` [K], scalars `alpha_pre`, `alpha_post`, `alpha_res`; belongs to `Form.liger`."""
    phi, b, *alphas = _take(state, prefix, "phi", "b", *(f"alpha_{group}" for group in _GROUPS))
    return _own(phi.T.contiguous(), _packed(alphas), b, (prefix + "phi", prefix + "alpha_*", prefix + "b"))


def to_liger(state: State, form: Form, prefix: str = "") -> dict[str, Tensor]:
    """Give `LigerMHC` the arguments of form."""
    state = _fitted(
        state,
        form,
        lambda f: Form.liger(
            tmax=_iterations(f),
            rms_eps=f.rms.eps,
            pre_eps=f.gates.pre_eps,
            sinkhorn_eps=f.sinkhorn.eps,
            post_mult=f.gates.post_mult,
        ),
        "Liger",
    )
    alphas = {f"{prefix}alpha_{group}": value for group, value in zip(_GROUPS, state["scale"].unbind(), strict=True)}
    return {prefix + "phi": state["phi"].T.contiguous(), prefix + "b": state["bias"]} | alphas


def from_megatron(state: State, prefix: str = "") -> dict[str, Tensor]:
    """`mapping_proj.weight` [K, n*C], `bias` [K], `alpha_pre`, `alpha_post`, `alpha_res` [1].

    prefix: "decoder.layers.0.self_attention_hyper_connection." or the like. Belongs to `Form.megatron`, whose argument
    softmax says which version of Megatron-LM wrote the checkpoint: the parameters do not. Nor do they show whether
    `mhc_single_pass` was set. Then a sublayer reads with the previous h_pre, which no `HyperConnection` does.
    """
    names = ("mapping_proj.weight", "bias", *(f"alpha_{group}" for group in _GROUPS))
    phi, bias, *alphas = _take(state, prefix, *names)
    return _own(phi, _packed(alphas), bias, (prefix + "mapping_proj.weight", prefix + "alpha_*", prefix + "bias"))


def to_megatron(state: State, form: Form, prefix: str = "", *, softmax: bool = False) -> dict[str, Tensor]:
    """Set `mhc_sinkhorn_iterations` to that of form; softmax is as in `Form.megatron`."""
    state = _fitted(state, form, lambda f: Form.megatron(iterations=_iterations(f), softmax=softmax), "Megatron-LM")
    scale = state["scale"]
    alphas = {f"{prefix}alpha_{group}": scale[i : i + 1] for i, group in enumerate(_GROUPS)}
    return {prefix + "mapping_proj.weight": state["phi"], prefix + "bias": state["bias"]} | alphas


def from_megatron_head(state: State, prefix: str = "") -> dict[str, Tensor]:
    """`hc_head_fn` [n, n*C], `hc_head_base` [n], `hc_head_scale` [1] of a block that ends in a learned contraction.

    prefix: that of the block, "decoder.".

    For `HyperHead` with `Rms(eps)` and `Gates(pre_eps=eps)`, eps being the config's `layernorm_epsilon`.
    """
    return _head(state, prefix, "hc_head_fn", "hc_head_scale", "hc_head_base")


def to_megatron_head(state: State, form: Form, prefix: str = "") -> dict[str, Tensor]:
    """Set `layernorm_epsilon` of the config to that of form."""
    fits = form.rms.mode == "inside" and form.gates.pre_eps == form.rms.eps
    _fitting_head(form, fits, "Megatron-LM", "rms.mode 'inside' and gates.pre_eps equal to rms.eps")
    return {
        prefix + "hc_head_fn": state["phi"],
        prefix + "hc_head_base": state["bias"],
        prefix + "hc_head_scale": state["scale"],
    }


def transpose_res(state: State, form: Form) -> tuple[dict[str, Tensor], Form]:
    """The same function with h_res applied the other way: logits transposed, and the axes of Sinkhorn exchanged.

    state: phi, scale and bias of a `HyperConnection`, other entries are passed on. The result computes what state
    and form do, exactly. Raises ValueError for a softmax start with eps, which has no transposed form.
    """
    form = _canonical(form)
    sinkhorn = form.sinkhorn
    if sinkhorn.start == "softmax":
        raise ValueError(
            f"form has {sinkhorn}; expected another start, or eps = start_eps = 0: a softmax over rows with eps has no "
            "transposed form"
        )
    n = _streams(state["bias"], "bias")
    rows = torch.arange(n * n + 2 * n, device=state["bias"].device)
    rows[2 * n :] = rows[2 * n :].view(n, n).T.flatten()
    turned = replace(sinkhorn, first="columns" if sinkhorn.first == "rows" else "rows")
    moved = {"phi": state["phi"][rows], "bias": state["bias"][rows]}
    return dict(state) | moved, replace(form, sinkhorn=turned, transposed=not form.transposed)


def _canonical(form: Form) -> Form:
    """A form without eps, spelled from exp: a row softmax is a half-step over rows, and shifts of the logits cancel."""
    sinkhorn = form.sinkhorn
    if not sinkhorn.in_logarithms or (sinkhorn.start == "exp" and not sinkhorn.clamp):
        return form
    # With eps = 0 a clamp does nothing; rows twice are rows once.
    more = sinkhorn.start == "softmax" and (sinkhorn.first == "columns" or sinkhorn.steps == 0)
    first = "rows" if sinkhorn.start == "softmax" else sinkhorn.first
    return replace(form, sinkhorn=Sinkhorn(sinkhorn.steps + more, "exp", first, 0.0, 0.0))


def _iterations(form: Form) -> int:
    """How many times both axes are normalised; a softmax start counts as one normalisation of rows."""
    return (form.sinkhorn.steps + 1) // 2


def _fitted(state: State, form: Form, family: Callable[[Form], Form], library: str) -> State:
    """state for a library that computes family(form), transposed if the library needs it."""
    for name in ("phi", "scale", "bias"):
        if name not in state:
            raise KeyError(f"{name} is missing; state has {', '.join(state)}")
    given = _canonical(form)
    if given == _canonical(family(given)):
        return state
    if given.sinkhorn.start != "softmax":
        moved, turned = transpose_res(state, given)
        if turned == _canonical(family(turned)):
            return moved
    raise ValueError(
        f"form is {form}; {library} computes {family(given)}, and no order of the parameters makes them equal"
    )


def _fitting_head(form: Form, fits: bool, library: str, expected: str) -> None:
    if not fits:
        raise ValueError(f"form is {form}; a head of {library} has {expected}")


def _take(state: State, prefix: str, *names: str) -> list[Tensor]:
    for name in names:
        if prefix + name not in state:
            raise KeyError(f"{prefix}{name} is missing; state has {', '.join(state)}")
    return [state[prefix + name] for name in names]


def _packed(alphas: list[Tensor]) -> Tensor:
    return torch.cat([alpha.reshape(1) for alpha in alphas])


def _streams(bias: Tensor, name: str) -> int:
    n = isqrt(bias.numel() + 1) - 1
    if n < 1 or n * n + 2 * n != bias.numel():
        raise ValueError(f"{name} has shape {list(bias.shape)}; expected n*n + 2*n elements")
    return n


def _own(phi: Tensor, scale: Tensor, bias: Tensor, names: tuple[str, str, str]) -> dict[str, Tensor]:
    n = _streams(bias, names[2])
    if phi.dim() != 2 or phi.shape[0] != bias.numel() or phi.shape[1] % n:
        raise ValueError(
            f"{names[0]} has, as [K, n*C], shape {list(phi.shape)}; expected K = {bias.numel()} and n = {n}"
        )
    if tuple(scale.shape) != (3,):
        raise ValueError(f"{names[1]} has shape {list(scale.shape)}; expected [3]")
    return {"phi": phi, "scale": scale, "bias": bias}


def _head(state: State, prefix: str, phi_name: str, scale_name: str, bias_name: str) -> dict[str, Tensor]:
    phi, scale, bias = _take(state, prefix, phi_name, scale_name, bias_name)
    if phi.dim() != 2 or bias.shape != phi.shape[:1] or phi.shape[1] % phi.shape[0]:
        raise ValueError(
            f"{prefix}{phi_name} has shape {list(phi.shape)} and {prefix}{bias_name} {list(bias.shape)}; "
            "expected [n, n*C] and [n]"
        )
    if scale.numel() != 1:
        raise ValueError(f"{prefix}{scale_name} has shape {list(scale.shape)}; expected [1]")
    return {"phi": phi, "scale": scale.reshape(1), "bias": bias}
