"""The loops that lowering on a CPU leaves, against float64 and the references."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mhc_compile.encoding import to_text
from mhc_compile.forms import RMS_MODES, SINKHORN_AXES, SINKHORN_STARTS, Gates, Rms, Sinkhorn
from mhc_compile.ops import _loops, _mix
from mhc_compile.ops.sinkhorn import gradient, reference

WIDTH = 40
# No neighbours of others: sizes of parts, and forms that differ in one thing.
FORMS = list(itertools.product(RMS_MODES, SINKHORN_STARTS, SINKHORN_AXES, (False, True), (0, 1, 39)))


def _tensors(n: int, parts: int, tokens: int, *, groups: bool = True, more: int = 0) -> dict[str, Any]:
    """more: rows of phi without gates."""
    torch.manual_seed(0)
    k = [n, 2 * n, 2 * n + n * n][parts - 1]
    return {
        "d_layer_input": torch.randn(tokens, WIDTH),
        "d_h_pre": None,
        "d_h_post": torch.randn(tokens, n) if parts > 1 else None,
        "d_h_res": torch.randn(tokens, n, n) if parts > 2 else None,
        "x": torch.randn(tokens, n, WIDTH),
        "h": torch.randn(tokens, k + more) * 3,
        "ms": torch.rand(tokens) + 0.1,
        "scale": torch.rand(parts if groups else k) + 0.5,
        "bias": torch.randn(k),
    }


def _by_loops(t: dict[str, Any], phi: Tensor, forms: dict[str, Any]) -> list[Tensor]:
    """The gates of x, and gradients of h and ms as they are given; dphi stands for dh."""
    flat = {name: value for form in forms.values() for name, value in form.as_kwargs().items()}
    parameters, gradients = (phi, t["scale"], t["bias"], None), (t["d_layer_input"], None, t["d_h_post"], t["d_h_res"])
    gates = _loops.mix(t["x"], *parameters, **flat)[:3]
    saved = (t["x"], t["scale"], t["bias"], t["h"], t["ms"])
    h_pre, dh, dms, dscale, dbias = _loops.mix_backward((*gradients, None, None), *saved, **flat)
    return [*gates, h_pre, dms, dh.t() @ t["x"].flatten(1), dscale, dbias]


def _by_references(t: dict[str, Any], phi: Tensor, forms: dict[str, Any]) -> list[Tensor]:
    flat, n = t["x"].flatten(1), t["x"].shape[-2]
    gates = _mix.narrow_forward(flat @ phi.t(), flat.square().mean(-1), t["scale"], t["bias"], n, **forms)
    h_pre, dh, dms, dscale, dbias = _mix.narrow_backward(*t.values(), [True] * 4, **forms)
    assert dh is not None
    return [*gates, h_pre, dms, dh.t() @ flat, dscale, dbias]  # type: ignore[list-item]


def _error(values: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(values, exact, strict=True)]


@pytest.mark.parametrize(("n", "parts", "more"), [(4, 3, 0), (4, 2, 5), (4, 1, 0), (3, 3, 1), (1, 3, 0)])
def test_loops_are_as_accurate_as_the_references(n: int, parts: int, more: int) -> None:
    """In all forms, with whole tiles and parts of one, a scale for groups and for rows."""
    assert _loops._library(n) is not None
    for (mode, start, first, clamp, steps), tokens in zip(FORMS, itertools.cycle([37, 8]), strict=False):
        t = _tensors(n, parts, tokens, groups=steps != 1, more=more)
        forms = {
            "rms": Rms(0.3, mode),
            "gates": Gates(0.1, 1.5, 0.2),
            "sinkhorn": Sinkhorn(steps, start, first, eps=0.4 if clamp else 1e-6, clamp=clamp),
        }
        phi = torch.randn(len(t["bias"]) + more, n * WIDTH) * (3 / (n * WIDTH) ** 0.5)
        loops, plain = _by_loops(t, phi, forms), _by_references(t, phi, forms)
        wide = {name: None if value is None else value.double() for name, value in t.items()}
        exact = _by_references(wide, phi.double(), forms)
        assert [value.shape for value in loops] == [value.shape for value in exact]
        for error, other in zip(_error(loops, exact), _error(plain, exact), strict=True):
            # The same operations, but for the order of sums over columns and tokens.
            assert error <= 2 * other + 8 * torch.finfo(torch.float32).eps, (forms, tokens)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_matrices_alone_are_as_accurate_as_the_references(n: int) -> None:
    """Logits that no loop projects, in all forms, with whole tiles and parts of one."""
    assert _loops._library(n) is not None
    forms = (form for form in FORMS if form[0] == RMS_MODES[0])
    for (_, start, first, clamp, steps), tokens in zip(forms, itertools.cycle([37, 8]), strict=False):
        form = Sinkhorn(steps, start, first, eps=0.4 if clamp else 1e-6, clamp=clamp)
        torch.manual_seed(0)
        logits, d_out = 3 * torch.randn(tokens, n, n), torch.randn(tokens, n, n)
        flat = {name.removeprefix("sinkhorn_"): value for name, value in form.as_kwargs().items()}
        loops = [_loops.sinkhorn(logits, **flat), _loops.sinkhorn(logits, d_out, **flat)]
        plain = [reference(logits, sinkhorn=form), gradient(d_out, logits, sinkhorn=form)]
        wide = logits.double()
        exact = [reference(wide, sinkhorn=form), gradient(d_out.double(), wide, sinkhorn=form)]
        for error, other in zip(_error(loops, exact), _error(plain, exact), strict=True):
            assert error <= 2 * other + 8 * torch.finfo(torch.float32).eps, (form, tokens)
        for some in (slice(0, 1), slice(5, 8)):
            assert torch.equal(_loops.sinkhorn(logits[some].clone(), **flat), loops[0][some])
            assert torch.equal(_loops.sinkhorn(logits[some].clone(), d_out[some].clone(), **flat), loops[1][some])


@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_do_not_depend_on_each_other(threads: int) -> None:
    t, phi = _tensors(4, 3, 700), torch.randn(24, 4 * WIDTH)
    parameters, shared = (phi, t["scale"], t["bias"], None), {"scale", "bias"}

    def evaluate(t: dict[str, Any]) -> list[Tensor]:
        gradients = (t["d_layer_input"], None, t["d_h_post"], t["d_h_res"], None, None)
        back = _loops.mix_backward(gradients, t["x"], t["scale"], t["bias"], t["h"], t["ms"])
        read = (back[0], t["d_layer_input"])
        return [
            *_loops.mix(t["x"], *parameters),
            *back[:3],
            _loops.products(t["x"], t["x"]),
            *_loops.project(t["x"], phi),
            _loops.unproject(t["x"], t["h"], phi),
            _loops.unproject(t["x"], t["h"], phi, None, t["ms"], aggregated=read, d_x=t["x"]),
        ]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = evaluate(t)
        for some in (slice(0, 1), slice(5, 8), slice(3, 19), slice(400, None)):
            part = {
                name: value if value is None or name in shared else value[some].clone() for name, value in t.items()
            }
            assert all(torch.equal(a[some], b) for a, b in zip(whole, evaluate(part), strict=True)), some
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("n", "width", "tokens"), [(4, 40, 37), (3, 7, 5), (2, 300, 26), (8, 129, 3), (1, 1, 1)])
def test_products_with_phi(n: int, width: int, tokens: int) -> None:
    """Forward and backward, where tiles of columns and tokens are whole and where they are not."""
    torch.manual_seed(0)
    k = n * n + 2 * n
    x, phi, d_h = torch.randn(tokens, n, width), torch.randn(k, n * width), torch.randn(tokens, k)
    *_, h, ms = _loops.mix(x, phi, torch.ones(3), torch.zeros(k), None)
    dx = _loops.unproject(x, d_h, phi)
    flat = x.flatten(1).double()
    exact = [flat @ phi.double().t(), flat.square().mean(-1), (d_h.double() @ phi.double()).view(x.shape)]
    for error in _error([h, ms, dx], exact):
        assert error < 3e-7
    assert all(map(torch.equal, _loops.project(x, phi), (h, ms)))


# Sizes of which neither tokens nor columns fill tiles, a group of tokens, blocks of columns, one number.
SIZES = [(7, 4, 40), (100, 3, 7), (26, 2, 300), (37, 8, 129), (5, 4, 1056), (1, 1, 1)]
TERMS = ["the mean square", "that of the second projection", "a read", "a write", "a gradient from elsewhere"]


def _terms(
    size: tuple[int, int, int], named: set[str], dtype: torch.dtype, *, second: bool
) -> tuple[_loops.StreamGradient, Tensor]:
    """Terms of a gradient of streams in this dtype, and their sum in float64."""
    tokens, n, width = size
    torch.manual_seed(0)
    x, d_new, d_x = (torch.randn(tokens, n, width).to(dtype) for _ in range(3))
    d_out, h_pre, h_res = torch.randn(tokens, width).to(dtype), torch.randn(tokens, n), torch.randn(tokens, n, n)
    of, exact = _loops.StreamGradient(None, None), torch.zeros(tokens, n, width, dtype=torch.float64)
    for rows, names, term in [(5, ("d_h", "phi", "d_ms"), TERMS[0]), (24, ("more_h", "more_phi", "more_ms"), TERMS[1])]:
        if rows == 5 or second:
            d_h, phi, d_ms = torch.randn(tokens, rows), torch.randn(rows, n * width), torch.randn(tokens) * n * width
            exact += (d_h.double() @ phi.double()).view(exact.shape)
            of = of._replace(**dict(zip(names, (d_h, phi, d_ms if term in named else None), strict=True)))
            if term in named:
                of = of._replace(x=x)
                exact += 2 / (n * width) * d_ms.double()[:, None, None] * x.double()
    if "a read" in named:
        of = of._replace(h_pre=h_pre, d_out=d_out)
        exact += h_pre.double()[..., None] * d_out.double()[:, None]
    if "a write" in named:
        of = of._replace(h_res=h_res, d_new=d_new)
        exact += h_res.double() @ d_new.double()
    if "a gradient from elsewhere" in named:
        of = of._replace(d_x=d_x)
        exact += d_x.double()
    return of, exact


def _sum(of: _loops.StreamGradient, size: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    tokens, n, width = size
    out = torch.full(size, torch.nan, dtype=dtype)
    loop = to_text(["unproject", "float32", n, {}, *of.constants(out)])
    _loops.run(loop, of, [width, tokens], written=[out])
    return out


SOME_TERMS = [set(some) for count in range(len(TERMS) + 1) for some in itertools.combinations(TERMS, count)]


@pytest.mark.parametrize("second", [False, True], ids=["one projection", "two projections"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_set_of_terms_of_a_gradient_of_streams(size: tuple[int, int, int], second: bool) -> None:
    """Each alone, and each with each."""
    for named in SOME_TERMS:
        of, exact = _terms(size, named, torch.float32, second=second)
        (error,) = _error([_sum(of, size, torch.float32)], [exact])
        assert error < 5e-7, named


@pytest.mark.parametrize("second", [False, True], ids=["one projection", "two projections"])
@pytest.mark.parametrize("width", [8, 40, 256])
def test_the_products_with_phi_have_small_roundings(width: int, second: bool) -> None:
    """They are small beside what comes through a write, and their sums over logits must not be rounded as that is."""
    size = (400, 4, width)
    of, _ = _terms(size, {"a write"}, torch.float32, second=second)
    of = of._replace(phi=of.phi / 100, more_phi=of.more_phi / 100 if of.more_phi is not None else None)
    wide = of._replace(**{name: None if value is None else value.double() for name, value in of._asdict().items()})
    exact, plain = torch.empty(size, dtype=torch.float64), torch.empty(size)
    loop = _loops._Loop("unproject", "float64", size[1], {})  # which has references alone
    for into, terms in [(exact, wide), (plain, of)]:
        _loops._unproject_by_references(loop, [into], terms, [width, size[0]])
    error, other = _error([_sum(of, size, torch.float32), plain], [exact, exact])
    assert error <= (1.1 + 5 / exact.numel() ** 0.5) * other


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_gradient_of_bfloat16_streams_is_rounded_once(size: tuple[int, int, int]) -> None:
    """Any of its terms may be bfloat16, and the sum is that of the floats that they are."""
    of, _ = _terms(size, set(TERMS), torch.bfloat16, second=True)
    wide = of._replace(**{name: getattr(of, name).float() for name in ("x", "d_out", "d_new", "d_x")})
    whole = _sum(wide, size, torch.float32)
    for name in ("x", "d_out", "d_new", "d_x"):
        mixed = wide._replace(**{name: getattr(of, name)})
        assert torch.equal(_sum(mixed, size, torch.float32), whole)
    assert torch.equal(_sum(of, size, torch.bfloat16), whole.bfloat16())


def test_a_gradient_that_is_no_number() -> None:
    """Infinity and NaN stay what they are as bfloat16, and what is too large becomes infinity."""
    size = (1, 1, 4)
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max]).view(size)
    of = _loops.StreamGradient(torch.zeros(1, 1), torch.zeros(1, 4), d_x=values)
    torch.testing.assert_close(_sum(of, size, torch.bfloat16), values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_terms_of_any_strides(dtype: torch.dtype) -> None:
    """A loop gets copies of what does not lie in the order of its elements."""
    torch.manual_seed(0)
    tokens, n, width, k = 11, 4, 24, 6
    x, d_x = (torch.randn(n, width, tokens).to(dtype).permute(2, 0, 1) for _ in range(2))
    d_out, h_pre = torch.randn(width, tokens).to(dtype).t(), torch.randn(tokens, 9)[:, :n].to(dtype)
    d_h, phi = torch.randn(tokens, 9)[:, :k].to(dtype), torch.randn(n * width, k).to(dtype).t()
    d_ms = torch.randn(tokens, 2)[:, 1].to(dtype)

    def gradient(*given: Tensor) -> Tensor:
        x, d_x, d_out, h_pre, d_h, phi, d_ms = given
        return _loops.unproject(x, d_h, phi, None, d_ms, aggregated=(h_pre, d_out), d_x=d_x)

    strided = (x, d_x, d_out, h_pre, d_h, phi, d_ms)
    found = gradient(*strided)
    assert found.dtype == dtype
    assert torch.equal(found, gradient(*[value.contiguous() for value in strided]))
    exact = gradient(*[value.double() for value in strided])
    (error,) = _error([found], [exact])
    assert error < {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float64: 1e-12}[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lay_out", [
    lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    lambda t: torch.stack([t, t], -1)[..., 0],
    lambda t: t[:1].expand(t.shape),
], ids=["transposed", "every other", "expanded"])  # fmt: skip
def test_every_loop_takes_tensors_of_any_strides(lay_out: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    """A program may hand on a gradient as a view of anything."""

    def results(t: dict[str, Any], phi: Tensor, logits: Tensor) -> list[Tensor]:
        gradients = (t["d_layer_input"], None, t["d_h_post"], t["d_h_res"], t["h"], t["ms"])
        return [
            *_loops.mix(t["x"], phi, t["scale"], t["bias"]),
            *_loops.mix_backward(gradients, t["x"], t["scale"], t["bias"], t["h"], t["ms"]),
            _loops.sinkhorn(logits),
            _loops.sinkhorn(logits, t["d_h_res"]),
            _loops.products(t["x"], t["x"]),
            *_loops.project(t["x"], phi),
            _loops.unproject(t["x"], t["h"], phi, dms=t["ms"]),
            _loops.phi_gradient(t["h"].float(), t["x"]),
        ]

    strided = {}
    for name, value in _tensors(4, 3, 12).items():
        if value is not None:  # of two dimensions of tokens, which no view may join
            strided[name] = lay_out((value if name in ("scale", "bias") else value.unflatten(0, (3, 4))).to(dtype))
    phi, logits = lay_out(torch.randn(24, 4 * WIDTH).to(dtype)), lay_out(torch.randn(3, 4, 4, 4).to(dtype))
    plain = {name: t.contiguous() for name, t in strided.items()}
    assert all(map(torch.equal, results(strided, phi, logits), results(plain, phi.contiguous(), logits.contiguous())))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_gradient_of_streams_in_threads(threads: int) -> None:
    """Its bits are those of one token alone, whatever tile and thread it is in."""
    size = (301, 4, 200)
    of, _ = _terms(size, set(TERMS), torch.float32, second=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = _sum(of, size, torch.float32)
        for token in (0, 5, 6, 95, 96, 300):
            alone = of._replace(**{
                name: value[token : token + 1].contiguous()
                for name, value in of._asdict().items()
                if name not in ("phi", "more_phi")
            })  # fmt: skip
            assert torch.equal(_sum(alone, (1, 4, 200), torch.float32)[0], whole[token])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("n", "width", "tokens", "rows"), [(4, 40, 37, 10), (4, 40, 9, 61), (2, 7, 1, 20)])
def test_any_number_of_logits(n: int, width: int, tokens: int, rows: int) -> None:
    """Also more than gates have; a row's sum is that of this row alone."""
    torch.manual_seed(0)
    x, phi, weight = torch.randn(tokens, n, width), torch.randn(rows, n * width), torch.randn(n * width)
    (h, ms), d_h = _loops.project(x, phi, weight), torch.randn(tokens, rows)
    flat, wide = x.flatten(1).double(), phi.double() * weight.double()
    exact = [flat @ wide.t(), flat.square().mean(-1), (d_h.double() @ wide).view(x.shape)]
    for error in _error([h, ms, _loops.unproject(x, d_h, phi, weight)], exact):
        assert error < 3e-7
    assert torch.equal(h[:, -1:], _loops.project(x, phi[-1:], weight)[0])


@pytest.mark.parametrize(("n", "width", "tokens"), [(4, 40, 37), (3, 7, 5), (2, 300, 26), (8, 129, 3)])
def test_bfloat16_is_read_as_the_floats_that_it_is(n: int, width: int, tokens: int) -> None:
    torch.manual_seed(0)
    k = n * n + 2 * n
    x, rows = torch.randn(tokens, n, width).bfloat16(), torch.randn(tokens, 2, width).bfloat16()
    parameters = torch.randn(k, n * width), torch.ones(3), torch.zeros(k)
    assert all(map(torch.equal, _loops.mix(x, *parameters), _loops.mix(x.float(), *parameters)))
    whole = _loops.products(x.float(), rows.float())
    for a, b in itertools.product((x, x.float()), (rows, rows.float())):
        assert torch.equal(_loops.products(a, b), whole)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The references do the same, and it is said once."""

    def fail(source: str) -> None:
        raise RuntimeError("no compiler")

    t, phi = _tensors(4, 3, 5), torch.randn(24, 4 * WIDTH)
    more = (torch.randn_like(t["h"]), torch.randn_like(t["ms"]))
    gradients = (t["d_layer_input"], None, t["d_h_post"], t["d_h_res"], *more)
    parameters = (phi, t["scale"], t["bias"], None)
    logits = torch.randn(5, 4, 4)

    def evaluate() -> list[Tensor]:
        forward = _loops.mix(t["x"], *parameters)
        backward = _loops.mix_backward(gradients, t["x"], t["scale"], t["bias"], t["h"], t["ms"])
        apart = (*_loops.project(t["x"], phi), _loops.unproject(t["x"], t["h"], phi))
        size = (5, 4, WIDTH)
        sums = [_sum(_terms(size, named, torch.float32, second=True)[0], size, torch.float32) for named in SOME_TERMS]
        alone = [_loops.sinkhorn(logits), _loops.sinkhorn(logits, t["d_h_res"])]
        return [*forward, *backward, _loops.products(t["x"], t["x"]), *apart, *sums, *alone]

    with_loops = evaluate()
    _loops._library.cache_clear()
    _loops._read.cache_clear()
    monkeypatch.setattr(_loops.compat, "cpp_library", fail)
    try:
        without = evaluate()
        assert _loops._library(3) is None
    finally:
        _loops.forget_failures()
    assert [record.getMessage().split(": ")[1:] for record in caplog.records] == [["RuntimeError", "no compiler"]]
    monkeypatch.undo()
    assert _loops._library(4) is not None
    assert all(map(torch.equal, without, torch.ops.mhc.generate_mix(t["x"], *parameters)))
    for a, b in zip(with_loops, without, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_parameters_of_other_dtypes() -> None:
    """The loops get copies."""
    x, phi = torch.randn(300, 4, WIDTH), torch.randn(24, 4 * WIDTH)
    scale, bias = torch.rand(24).bfloat16(), torch.randn(24).bfloat16()
    narrow = _loops.mix(x, phi, scale, bias)
    assert all(map(torch.equal, narrow, _loops.mix(x, phi, scale.float(), bias.float())))

    *_, h, ms = narrow

    def gradients(ms: Tensor) -> Any:
        return _loops.mix_backward((None, None, None, None, h, ms), x, scale, bias, h, ms)

    assert all(map(torch.equal, gradients(ms.bfloat16()), gradients(ms.bfloat16().float())))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_streams_of_other_dtypes(dtype: torch.dtype) -> None:
    """float16 is read as float32, and float64 by the references alone."""
    t, phi = _tensors(4, 3, 37), torch.randn(24, 4 * WIDTH, dtype=dtype)
    t = {name: value if value is None else value.to(dtype) for name, value in t.items()}
    wide = torch.promote_types(dtype, torch.float32)
    gradients = (t["d_layer_input"], None, t["d_h_post"], t["d_h_res"], None, None)

    def evaluate(dtype: torch.dtype) -> list[Tensor]:
        parameters = [value.to(dtype) for value in (phi, t["scale"], t["bias"])]
        x, h, ms = (t[name].to(dtype) for name in ("x", "h", "ms"))
        given = [value if value is None else value.to(dtype) for value in gradients]
        backward = _loops.mix_backward(given, x, *parameters[1:], h, ms)
        return [*_loops.mix(x, *parameters), *backward, _loops.products(x, x), _loops.unproject(x, h, parameters[0])]

    results = evaluate(dtype)
    assert {result.dtype for result in results} == {wide}
    assert all(map(torch.equal, results, evaluate(wide)))
    if dtype == torch.float64:
        exact = torch.ops.mhc.generate_mix(t["x"], phi, t["scale"], t["bias"])
        assert all(map(torch.equal, results[:5], exact))


@pytest.mark.parametrize("mode", RMS_MODES)
def test_a_root_that_is_eps(mode: str) -> None:
    """`torch.clamp_min` hands its gradient on at a tie; streams of 1 and -1 have a root of exactly 1."""
    t = _tensors(4, 2, 3) | {"ms": torch.ones(3)}
    forms = {"rms": Rms(1.0, mode), "gates": Gates(post_mult=1.0), "sinkhorn": Sinkhorn()}
    ms = t["ms"].double().requires_grad_()
    root = ms.sqrt()
    factor = {
        "inside": (ms + 1).rsqrt(),
        "outside": 1 / (root + 1),
        "clamp": 1 / root.clamp_min(1.0),
        "none": ms * 0 + 1,
    }
    logits = t["h"].double() * factor[mode][:, None]
    scales = torch.cat([t["scale"].double()[part].expand(4) for part in range(2)])
    pre, post = torch.sigmoid(logits * scales + t["bias"].double()).split(4, -1)
    d_pre = (t["x"].double() * t["d_layer_input"].double().unsqueeze(-2)).sum(-1)
    (wanted,) = torch.autograd.grad([pre, post], [ms], [d_pre, t["d_h_post"].double()])
    phi = torch.randn(8, 4 * WIDTH)
    for found in (_by_loops(t, phi, forms), _by_references(t, phi, forms)):
        torch.testing.assert_close(found[4].double().view(-1), wanted, rtol=1e-5, atol=1e-6)
