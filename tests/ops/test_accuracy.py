"""Every operator's error against float64, outputs and gradients, compared with that of eager code.

docs/accuracy.md and docs/accuracy_cuda.md are the tables of a run on one machine:

    python -m tests.ops.test_accuracy [cuda]
"""

from __future__ import annotations

import functools
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mhc_compile import ops
from tests.ops import eager

DOCS = Path(__file__).resolve().parents[2] / "docs"
PATHS = {"cpu": DOCS / "accuracy.md", "cuda": DOCS / "accuracy_cuda.md"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N, C, TOKENS = 4, 256, (4, 64)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An operator and the eager code for it, on inputs that are made in float64."""

    own: Function
    eager: Function
    inputs: Callable[[], dict[str, Tensor]]
    outputs: tuple[str, ...]
    wide: tuple[str, ...] = ()
    """The inputs that are float32 in models, whatever the dtype of the streams."""


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()


def _projection(x: Tensor, phi: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    flat = _wide(x.flatten(-2))
    return F.linear(flat * norm_weight, phi), flat.square().mean(-1)


def _scale(h: Tensor, ms: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    normed = h * torch.rsqrt(ms.unsqueeze(-1) + 1e-6)
    pre, post, res = normed.split([N, N, N * N], -1)
    b_pre, b_post, b_res = bias.split([N, N, N * N])
    logits = (res * scale[2] + b_res).unflatten(-1, (N, N))
    return torch.sigmoid(pre * scale[0] + b_pre), 2 * torch.sigmoid(post * scale[1] + b_post), logits


def _sinkhorn(logits: Tensor) -> Tensor:
    p = logits.softmax(-1) + 1e-6
    p = p / (p.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        p = p / (p.sum(-1, keepdim=True) + 1e-6)
        p = p / (p.sum(-2, keepdim=True) + 1e-6)
    return p


def _log_sinkhorn(logits: Tensor) -> Tensor:
    """On potentials, as TransformerEngine does it."""
    u, v = torch.zeros_like(logits[..., :1]), torch.zeros_like(logits[..., :1, :])
    for _ in range(20):
        u = -torch.logsumexp(logits + v, -1, keepdim=True)
        v = -torch.logsumexp(logits + u, -2, keepdim=True)
    return torch.exp(logits + u + v)


def _aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    return (h_pre.unsqueeze(-1) * x).sum(-2).to(x.dtype)


def _aggregate_and_norm(x: Tensor, h_pre: Tensor, input_norm_weight: Tensor) -> Tensor:
    u = _aggregate(x, h_pre)
    normed = _wide(u) * torch.rsqrt(_wide(u).square().mean(-1, keepdim=True) + 1e-6)
    return (normed * input_norm_weight).to(u.dtype)


def _mixed_streams(x: Tensor, h: Tensor) -> Tensor:
    return torch.einsum("...io,...ic->...oc", h, _wide(x)).to(x.dtype)


def _mix(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, ms = _projection(x, phi, torch.ones((), dtype=phi.dtype))
    h_pre, h_post, logits = _scale(h, ms, scale, bias)
    return h_pre, h_post, _sinkhorn(logits)


def _mix_and_aggregate(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h_pre, h_post, h_res = _mix(x, *parameters)
    return _aggregate(x, h_pre), h_post, h_res


def _head(x: Tensor, phi: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    h, ms = _projection(x, phi, torch.ones((), dtype=phi.dtype))
    return _aggregate(x, torch.sigmoid(h * torch.rsqrt(ms.unsqueeze(-1) + 1e-6) * scale + bias))


def _mix_inputs(parts: int = 3) -> dict[str, Tensor]:
    return dict(zip(("x", "phi", "scale", "bias"), eager.mix_arguments(N, C, TOKENS, parts=parts), strict=True))


def _projection_inputs() -> dict[str, Tensor]:
    inputs = _mix_inputs()
    return {"x": inputs["x"], "phi": inputs["phi"], "norm_weight": 0.5 + torch.rand(N * C, dtype=torch.float64)}


def _scale_inputs() -> dict[str, Tensor]:
    inputs = _mix_inputs()
    h, ms = ops.projection(inputs["x"], inputs["phi"])
    return {"h": h, "ms": ms, "scale": inputs["scale"], "bias": inputs["bias"]}


def _combine_inputs() -> dict[str, Tensor]:
    names = ("f", "layer_bias", "h_post", "x", "h_res")
    return dict(zip(names, eager.combine_arguments(N, C, TOKENS), strict=True))


def _boundary_inputs() -> dict[str, Tensor]:
    mix = _mix_inputs()
    return _combine_inputs() | {name: mix[name] for name in ("phi", "scale", "bias")}


def _boundary(
    f: Tensor, layer_bias: Tensor, h_post: Tensor, x: Tensor, h_res: Tensor, *parameters: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x_new = eager.combine(f, layer_bias, h_post, x, h_res)
    return x_new, *_mix_and_aggregate(x_new, *parameters)


def _shifted_inputs() -> dict[str, Tensor]:
    inputs = _boundary_inputs()
    names = ("f", "layer_bias", "h_post", "x", "h_res")
    return {name: inputs.pop(name) for name in names} | {"h_pre": _random(N).sigmoid()} | inputs


def _shifted_boundary(
    f: Tensor, layer_bias: Tensor, h_post: Tensor, x: Tensor, h_res: Tensor, h_pre: Tensor, *parameters: Tensor
) -> tuple[Tensor, ...]:
    x_new = eager.combine(f, layer_bias, h_post, x, h_res)
    return x_new, _aggregate(x_new, h_pre), *_mix(x_new, *parameters)


def _read_inputs() -> dict[str, Tensor]:
    return _combine_inputs() | {"h_pre": _random(N).sigmoid(), "phi": _mix_inputs()["phi"]}


def _combine_and_read(
    f: Tensor, layer_bias: Tensor, h_post: Tensor, x: Tensor, h_res: Tensor, h_pre: Tensor, phi: Tensor
) -> tuple[Tensor, ...]:
    x_new = eager.combine(f, layer_bias, h_post, x, h_res)
    return x_new, _aggregate(x_new, h_pre), _projection(x_new, phi, torch.ones((), dtype=phi.dtype))[0]


def _random(*shape: int) -> Tensor:
    return torch.randn(*TOKENS, *shape, dtype=torch.float64)


_LOG = {"steps": 40, "start": "exp", "first": "rows", "eps": 0.0, "start_eps": 0.0}
_PARAMETERS = ("phi", "scale", "bias", "norm_weight")

CASES = {
    "projection": Case(ops.projection, _projection, _projection_inputs, ("h", "ms"), _PARAMETERS),
    "scale": Case(
        lambda *a: ops.scale(*a, N),
        _scale,
        _scale_inputs,
        ("h_pre", "h_post", "res_logits"),
        ("h", "ms", *_PARAMETERS),
    ),
    "sinkhorn": Case(ops.sinkhorn, _sinkhorn, lambda: {"logits": _random(N, N)}, ("h_res",), ("logits",)),
    "sinkhorn, log": Case(
        lambda logits: ops.sinkhorn(logits, **_LOG),
        _log_sinkhorn,
        lambda: {"logits": 10 * _random(N, N)},
        ("h_res",),
        ("logits",),
    ),
    "aggregate": Case(
        ops.aggregate, _aggregate, lambda: {"x": _random(N, C), "h_pre": _random(N).sigmoid()}, ("out",), ("h_pre",)
    ),
    "aggregate_and_norm": Case(
        partial(ops.aggregate_and_norm, input_norm_eps=1e-6),
        _aggregate_and_norm,
        lambda: {
            "x": _random(N, C),
            "h_pre": _random(N).sigmoid(),
            "input_norm_weight": 0.5 + torch.rand(C, dtype=torch.float64),
        },
        ("out",),
        ("h_pre", "input_norm_weight"),
    ),
    "mix_streams": Case(
        ops.mix_streams,
        _mixed_streams,
        lambda: {"x": _random(N, C), "h": _random(N, N).softmax(-1)},
        ("out",),
        ("h",),
    ),
    "generate_mix": Case(ops.generate_mix, _mix, _mix_inputs, ("h_pre", "h_post", "h_res"), _PARAMETERS),
    "generate_mix_and_aggregate": Case(
        ops.generate_mix_and_aggregate,
        _mix_and_aggregate,
        _mix_inputs,
        ("layer_input", "h_post", "h_res"),
        _PARAMETERS,
    ),
    "head": Case(ops.head, _head, lambda: _mix_inputs(1), ("out",), _PARAMETERS),
    "expand": Case(
        lambda f: ops.expand(f, N),
        lambda f: f.unsqueeze(-2).expand(*f.shape[:-1], N, C),
        lambda: {"f": _random(C)},
        ("x",),
    ),
    "contract": Case(ops.contract, lambda x: x.mean(-2), lambda: {"x": _random(N, C)}, ("out",)),
    "boundary": Case(
        ops.boundary,
        _boundary,
        _boundary_inputs,
        ("x_new", "layer_input", "next h_post", "next h_res"),
        ("h_post", "h_res", "layer_bias", *_PARAMETERS),
    ),
    "expand_combine_and_read": Case(
        lambda *a: ops.expand_combine_and_read(*a)[:3],
        _combine_and_read,
        _read_inputs,
        ("x_new", "layer_input", "h"),
        ("h_post", "h_res", "h_pre", "layer_bias", *_PARAMETERS),
    ),
    "shifted_boundary": Case(
        ops.shifted_boundary,
        _shifted_boundary,
        _shifted_inputs,
        ("x_new", "layer_input", "next h_pre", "next h_post", "next h_res"),
        ("h_post", "h_res", "h_pre", "layer_bias", *_PARAMETERS),
    ),
    "expand_combine": Case(
        ops.expand_combine, eager.combine, _combine_inputs, ("x_new",), ("h_post", "h_res", "layer_bias")
    ),
}


def quantities(name: str) -> list[str]:
    """The outputs, and the inputs whose gradients are compared."""
    with torch.random.fork_rng(devices=[]):
        return [*CASES[name].outputs, *(f"d {key}" for key in CASES[name].inputs())]


@functools.cache
def measure(name: str, dtype: str, device: str) -> dict[str, tuple[float, float]]:
    """For each quantity ||result - truth|| / ||truth||, ours and the eager code's, both on the device."""
    case = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = case.inputs()
        # A gate computed in float32 is float32 below float32 as well.
        inputs = [value.to(device, torch.float32 if key in case.wide else DTYPES[dtype]) for key, value in made.items()]
        results = case.eager(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        upstream = [torch.randn(result.shape).to(device, result.dtype) for result in results]
    truth = eager.gradients(case.eager, [v.double() for v in inputs], [v.double() for v in upstream])
    found = [
        [_error(result, true) for result, true in zip(eager.gradients(call, inputs, upstream), truth, strict=True)]
        for call in (case.own, case.eager)
    ]
    names = [*case.outputs, *(f"d {key}" for key in made)]
    return {key: (own, theirs) for key, own, theirs in zip(names, *found, strict=True)}


def _error(result: Tensor, truth: Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_errors_are_at_most_those_of_the_eager_code(name: str, dtype: str, device: str) -> None:
    worse = {
        key: (own, theirs)
        for key, (own, theirs) in measure(name, dtype, device).items()
        # Where both are right but for the rounding of the result they differ by chance, a twentieth with these many
        # numbers; in float32 the order of a sum of 1,024 products moves an error of some 1e-7 by as much, and a
        # gradient of scale is but three sums, over 256 tokens, of terms that cancel.
        if own > 1.05 * theirs + (2e-6 if key == "d scale" else 3e-7)
    }
    assert worse == {}


def test_every_operator_has_a_case() -> None:
    assert {name.split(",")[0] for name in CASES} == set(ops.__all__)


def rows(lacking: Sequence[str] = ()) -> list[str]:
    """The table's lines without the numbers."""
    names = [name for name in CASES if name not in lacking]
    return [f"| {name} | {dtype} | {key} |" for name in names for dtype in DTYPES for key in quantities(name)]


_LACKS = "The table lacks "


def lacking(text: str) -> list[str]:
    """The operators that a table lacks because they are newer."""
    return [name for name in CASES if f"\n| {name} | " not in text]


def with_what_it_lacks(text: str) -> str:
    """The page of a GPU's run, with a line for each operator that is newer than the run."""
    lines = [line for line in text.split("\n") if not line.startswith(_LACKS)]
    place = lines.index("The operators run their kernels there.") + 1
    lines[place:place] = [f"{_LACKS}`{name}`, which was added after this run." for name in lacking(text)]
    return "\n".join(lines)


@pytest.mark.parametrize("path", [path for path in PATHS.values() if path.exists()], ids=lambda path: path.name)
def test_the_table_has_every_row(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    listed = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| operator")]
    found = [line[: line.index("|", line.index("|", line.index("|", 1) + 1) + 1) + 1] for line in listed]
    # On a difference: python -m tests.ops.test_accuracy
    assert found == rows(lacking(text) if path == PATHS["cuda"] else ())
    if path == PATHS["cuda"]:
        assert text == with_what_it_lacks(text)
    else:
        assert text.startswith(f"# Accuracy\n\n{_RULE}")
    assert all(math.isfinite(float(cell)) for line in listed for cell in line.split("|")[4:6])


# Beside the table of the CPU: what is compared when a model is judged, and what other tests hold of the operators.
_RULE = """\
A compiled model must be as accurate as eager code. Errors are measured against an evaluation in float64.

## The rule

`mhc_compile.verify`, [`mhc.check`](checking.md) and `mhc_compile.testing.judge` use one rule. Two equally good
evaluations round differently, and one of them is always a little worse. So the rule leaves room for chance. N is the
number of values.

- **A tensor with N >= 1,000** may have 1.1 + 5 / sqrt(N) times eager's error. The same holds for all outputs
  together, and for all gradients together.
- **A tensor with fewer values** may have 4 times eager's error of this tensor, or 4 times the median of eager's errors,
  whichever is larger. All these tensors together may have 1.1 + 5 / sqrt(N) times eager's error, but at least 1.25
  times.
- **Gradients that vanish** may have 10 times eager's error, or 1e-12 of the root mean square of all gradients.
  If only some gradients of a tensor vanish, 10 times holds for the median run, and 100 times for the worst one.
- An error of 4 roundings always passes, except for gradients that vanish.
- **The dtype** has to be eager's. The roundings are those of this dtype.
- **If all exact values are 0**, of all outputs or of all gradients, errors have no size to be relative to. All together
  may have 1.1 + 5 / sqrt(N) times eager's error, and each tensor 10 times its own. Nothing else passes.
- **Integers and booleans** may differ from float64 as often as eager's, times the factor for N values. One in 10,000
  always may.
- **Infinities and NaN** are right where float64 has the same. In `verify`, the same as in eager code is right, too.
  Where eager code has one and float64 a number, so is a number that is roughly float64's.

A gradient vanishes if it is below 1e-12 of its tensor's root mean square. All gradients of a tensor vanish if their
root mean square is below a millionth of that of all gradients. Relative errors of such gradients mean little. But Adam
moves a parameter by a tiny gradient as far as by a large one.

If a result breaks the rule, `verify` makes 8 more runs of eager code and mhc, with parameters perturbed by 1%. It
judges all nine runs together, once. One unlucky run does not decide.

The operators have tests of their own with stricter rules:

- `tests/ops/test_accuracy.py` compares the operators below with eager code, on a CPU and with `-m gpu` on a GPU.
- `tests/ops/test_rounding.py` and `tests/kernels/test_rounding.py` compare Sinkhorn and gates for extreme logits: from
  1e-6 to 1e4, equal, opposite, saturated and nearly tied. An error may reach the largest of these limits:
    - 1.1 + 5 / sqrt(N) times eager's error. For Sinkhorn, N counts the tokens that make up most of eager's error. For
      gates, N is the number of values, and eager's error is the largest of eight nearly equal inputs.
    - 10 times eager's error, for gradients of Sinkhorn whose exact values vanish; 4 times, for scale and bias.
    - 4 roundings of the exact values.
    - 1e-12 of the incoming gradient.

[Accuracy on a GPU](accuracy_cuda.md) has the errors of the kernels. [Measurements](measurements.md#a-whole-model) has
the errors of a whole model.

## The operators on a CPU
"""


def table(device: str) -> str:
    """The file in docs for this machine and a device of it."""
    on_cpu = device == "cpu"
    machine = f"a CPU ({platform.machine()})" if on_cpu else f"one {torch.cuda.get_device_name()}"
    lines = [
        "# Accuracy" if on_cpu else "# Accuracy on a GPU",
        "",
        *([_RULE] if on_cpu else ["[Accuracy](accuracy.md) explains the rule.", ""]),
        f"Written by `python -m tests.ops.test_accuracy{'' if on_cpu else ' cuda'}` with torch {torch.__version__} on "
        f"{machine}.",
        f"The operators run their {'references' if on_cpu else 'kernels'} there.",
        "",
        f"The error is ||result - truth|| / ||truth|| over {TOKENS[0] * TOKENS[1]} tokens of {N} streams of width {C}.",
        "The truth is the eager code in float64 on the same inputs. The dtype is that of the streams. Gates and",
        "parameters are float32. d means the gradient of an input.",
        "",
        "| operator | dtype | quantity | ours | eager |",
        "|---|---|---|---|---|",
    ]
    cells = [pair for name in CASES for dtype in DTYPES for pair in measure(name, dtype, device).values()]
    lines += [f"{row} {own:.1e} | {theirs:.1e} |" for row, (own, theirs) in zip(rows(), cells, strict=True)]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    PATHS[chosen].write_text(table(chosen), encoding="utf-8")
    PATHS["cuda"].write_text(with_what_it_lacks(PATHS["cuda"].read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PATHS[chosen]}\n")
