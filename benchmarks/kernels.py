"""Kernels alone: checks them against float64 at real sizes, then times every launch and some other tiles.

`python -m benchmarks.kernels [check] [time] [more] [few] [tiles] [sanitize]` on a machine with a GPU; figures belong
in docs/performance.md. `sanitize` only launches everything at small sizes, for compute-sanitizer.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.testing
from triton.runtime.jit import JITFunction

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import config, expand_combine, generate_mix_and_aggregate
from mhc_compile.kernels.config import Tile

FORMS: dict[str, Any] = {"rms": Rms(), "gates": Gates(), "sinkhorn": Sinkhorn()}
DEVICE = torch.device("cuda")


class Case:
    """One sublayer's tensors: n streams of width C for M tokens, phi, scale and bias in float32."""

    def __init__(self, tokens: int, n: int, width: int, dtype: torch.dtype = torch.bfloat16) -> None:
        rows = n * n + 2 * n

        def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*shape, device=DEVICE).to(dtype)

        self.n = n
        self.x, self.f = draw(tokens, n, width, dtype=dtype), draw(tokens, width, dtype=dtype)
        self.phi, self.bias = draw(rows, n * width) * (n * width) ** -0.5, draw(rows)
        self.scale = torch.rand(3, device=DEVICE) + 0.5
        self.grads = [
            draw(tokens, width, dtype=dtype),
            draw(tokens, n),
            draw(tokens, n, n),
        ]
        self.d_new = draw(tokens, n, width, dtype=dtype)
        self.out = self.mix()
        self.unit = tokens * width * self.x.element_size()

    def mix(self) -> tuple[torch.Tensor, ...]:
        return generate_mix_and_aggregate.forward(self.x, self.phi, self.scale, self.bias, **FORMS)

    def mix_backward(self) -> tuple[torch.Tensor, ...]:
        d_input, d_post, d_res = self.grads
        h, ms = self.out[3:]
        return generate_mix_and_aggregate.backward(
            d_input, d_post, d_res, None, None, self.x, self.phi, self.scale, self.bias, None, h, ms,
            [True, True, True, True, False], **FORMS,
        )  # fmt: skip

    def combine(self) -> torch.Tensor:
        return expand_combine.forward(self.f, None, self.out[1], self.x, self.out[2])

    def combine_backward(self) -> tuple[torch.Tensor, ...]:
        return expand_combine.backward(
            self.d_new, self.f, None, self.out[1], self.x, self.out[2], [True, False, True, True, True]
        )


def eager(x: torch.Tensor, phi: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """layer_input, h_post, h_res, h, ms of the default form, in the dtype of phi."""
    n = x.shape[-2]
    flat = x.flatten(-2).to(phi.dtype)
    h, ms = flat @ phi.T, flat.square().mean(-1)
    r = (ms + 1e-6).rsqrt()
    parts = torch.split(r[:, None] * h, [n, n, n * n], -1)
    offsets = torch.split(bias, [n, n, n * n])
    pre, post, res = (p * s + b for p, s, b in zip(parts, scale, offsets, strict=True))
    m = res.unflatten(-1, (n, n)).softmax(-1) + 1e-6
    for step in range(39):
        m = m / (m.sum(-2 if step % 2 == 0 else -1, keepdim=True) + 1e-6)
    return (pre.sigmoid()[..., None] * x.to(phi.dtype)).sum(-2), 2 * post.sigmoid(), m, h, ms


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm())


def check(tokens: int, n: int, width: int, dtype: torch.dtype) -> None:
    """Errors against float64, and those of the same eager code in float32 (outputs rounded to x's dtype)."""
    c = Case(tokens, n, width, dtype)
    names = ["layer_input", "h_post", "h_res", "h", "ms", "dx", "dphi", "dscale", "dbias"]
    results = {}
    for high in (torch.float64, torch.float32):
        p = [t.to(high).requires_grad_() for t in (c.x, c.phi, c.scale, c.bias)]
        outs = eager(*p)
        d = torch.autograd.grad(outs[:3], p, [g.to(high) for g in c.grads])
        results[high] = [t.detach() for t in (*outs, *d)]
        if high == torch.float32:
            for at in (0, 5):
                results[high][at] = results[high][at].to(dtype)
    mine = [*c.out, *c.mix_backward()[:4]]
    cells = []
    for name, a, e, ref in zip(names, mine, results[torch.float32], results[torch.float64], strict=True):
        cells.append(f"{name} {distance(a, ref):.1e}/{distance(e, ref):.1e}")
    print(f"mix M={tokens} n={n} C={width} {dtype} ours/eager32: " + ", ".join(cells))
    p = [t.double().requires_grad_() for t in (c.f, c.out[1], c.x, c.out[2])]
    new = p[1][..., None] * p[0][:, None] + torch.einsum("mio,mic->moc", p[3], p[2])
    d = torch.autograd.grad(new, p, c.d_new.double())
    got = c.combine_backward()
    cells = [f"new {distance(c.combine(), new.detach()):.1e}"]
    for name, a, ref in zip(["df", "dpost", "dx", "dres"], (got[0], got[2], got[3], got[4]), d, strict=True):
        cells.append(f"{name} {distance(a, ref):.1e}")
    print("combine: " + ", ".join(cells))


def invariance(n: int, width: int, dtype: torch.dtype) -> None:
    """Bitwise: any slice of a batch gives the slice of the result, forward and the per-token gradients."""
    c = Case(1000, n, width, dtype)
    new, back, mix_back = c.combine(), c.combine_backward(), c.mix_backward()
    different = set()

    def compare(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        if not torch.equal(a, b):
            different.add(name)

    for a, b, name in zip(c.mix_backward(), mix_back, ("dx", "dphi", "dscale", "dbias", ""), strict=True):
        compare(f"repeated {name}", a, b)
    for first, last in ((0, 1), (999, 1000), (5, 69), (17, 150), (100, 900)):
        s = slice(first, last)
        part = Case.__new__(Case)
        part.n, part.x, part.f, part.phi, part.scale, part.bias = n, c.x[s], c.f[s], c.phi, c.scale, c.bias
        part.grads, part.d_new = [g[s] for g in c.grads], c.d_new[s]
        part.out = part.mix()
        for a, b, name in zip(part.out, c.out, ("layer_input", "h_post", "h_res", "h", "ms"), strict=True):
            compare(f"{name}[{first}:{last}]", a, b[s])
        part.out = tuple(t[s] for t in c.out)
        compare("new", part.combine(), new[s])
        for i in (0, 2, 3, 4):
            compare(f"combine gradient {i}", part.combine_backward()[i], back[i][s])
        compare(f"dx[{first}:{last}]", part.mix_backward()[0], mix_back[0][s])
    print(f"invariance n={n} C={width} {dtype}: differs: {sorted(different) or 'nothing'}")


def median(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(call, warmup=30, rep=150, return_mode="median"))


def launches(
    call: Callable[[], object], only: str = "", timer: Callable[..., float] | None = None
) -> list[tuple[str, float]]:
    """Every kernel (or the one of this name) that call launches with its own median time."""
    found: list[tuple[str, Callable[[], object]]] = []
    original = JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.append((kernel.__name__, lambda: original(kernel, *args, grid=grid, warmup=False, **kwargs)))
        return original(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = record
    try:
        call()
    finally:
        JITFunction.run = original
    return [(name, (timer or median)(again)) for name, again in found if only in ("", name)]


def copy_bandwidth() -> float:
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median(lambda: target.copy_(source)) / 1e6


def report(label: str, milliseconds: float, units: float, c: Case, bandwidth: float) -> None:
    rate = units * c.unit / milliseconds / 1e6
    print(f"{label:44s} {milliseconds:.4f} ms  {units:5.1f} units  {rate:6.0f} GB/s  {rate / bandwidth:5.2f} of copy")


def timings(tokens: int, n: int, width: int, dtype: torch.dtype, bandwidth: float) -> None:
    """Each operator and each launch, with the bytes that must move counted in units of one stream."""
    c = Case(tokens, n, width, dtype)
    print(f"-- M={tokens} n={n} C={width} {dtype}, one unit {c.unit / 1e6:.1f} MB")
    for label, call, units in (
        ("generate_mix_and_aggregate", c.mix, 2 * n + 1),
        ("expand_combine", c.combine, 2 * n + 1),
        ("generate_mix_and_aggregate_backward", c.mix_backward, 3 * n + 2),
        ("expand_combine_backward", c.combine_backward, 3 * n + 2),
    ):
        report(label, median(call), units, c, bandwidth)
        for name, milliseconds in launches(call):
            print(f"    {name:40s} {milliseconds:.4f} ms")


def tiles(name: str, options: list[Tile], kernel: str, call: Callable[[], object]) -> None:
    """The time of one kernel under other tiles."""
    before = config.TILES[name]
    for option in options:
        config.TILES[name] = option
        try:
            cells = [f"{milliseconds:.4f}" for _, milliseconds in launches(call, kernel)]
            print(
                f"{name:18s} {option.tokens:4d} x {option.columns:4d} warps {option.warps:2d} stages {option.stages}: "
                + " ".join(cells),
                flush=True,
            )
        except Exception as error:
            print(f"{name} {option}: {type(error).__name__} {str(error)[:100]}")
    config.TILES[name] = before


def all_tiles(tokens: int) -> None:
    """Other tiles for each kernel at n = 4, C = 4,096: where the table of config.py comes from."""
    c = Case(tokens, 4, 4096)
    for name, kernel, call, sizes, stages in (
        ("project", "project_kernel", c.mix, ((64, 64), (128, 64), (128, 128)), (2, 3, 4)),
        ("aggregate", "mix_kernel", c.mix, ((8, 256), (8, 512), (16, 128), (16, 256)), (3,)),
        ("pre_gradient", "pre_gradient_kernel", c.mix_backward, ((8, 512), (16, 256), (32, 128)), (3,)),
        ("products", "products_kernel", c.mix_backward, ((64, 64), (64, 128), (128, 64), (128, 128)), (1, 2, 3)),
        ("combine", "combine_kernel", c.combine, ((8, 128), (8, 256), (16, 128), (32, 128)), (3,)),
        ("combine_backward", "combine_backward_kernel", c.combine_backward, ((8, 256), (16, 128), (32, 128)), (3,)),
    ):
        options = [Tile(*size, warps, depth) for size in sizes for warps in (4, 8) for depth in stages]
        tiles(name, options, kernel, call)


def graphed(call: Callable[[], object]) -> float:
    return float(triton.testing.do_bench_cudagraph(call, rep=10, return_mode="median"))


def few() -> None:
    """Small token counts inside a CUDA graph, so that only the device's time shows."""
    for tokens in (1, 8, 64, 512):
        c = Case(tokens, 4, 4096)
        cells = []
        for name, call in (
            ("mix", c.mix),
            ("combine", c.combine),
            ("mix_backward", c.mix_backward),
            ("combine_backward", c.combine_backward),
        ):
            cells.append(f"{name} {1000 * triton.testing.do_bench_cudagraph(call, rep=20, return_mode='median'):.1f}")
            host = []
            for _ in range(30):
                start = time.perf_counter()
                call()
                host.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            cells.append(f"(host {1e6 * statistics.median(host):.0f})")
            cells.append("[" + " ".join(f"{1000 * t:.1f}" for _, t in launches(call, timer=graphed)) + "]")
        print(f"M={tokens} microseconds: " + " ".join(cells))


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    wanted = sys.argv[1:] or ["check", "time"]
    if "sanitize" in wanted:
        for tokens, n, width in (
            (33, 4, 256),
            (3, 3, 129),
            (130, 2, 7),
            (2, 8, 40),
            (1, 16, 33),
            (257, 1, 1),
        ):
            c = Case(tokens, n, width)
            c.combine(), c.mix_backward(), c.combine_backward()
        torch.cuda.synchronize()
        return
    start = time.perf_counter()
    warm = Case(8192, 4, 4096)
    for call in (warm.mix, warm.combine, warm.mix_backward, warm.combine_backward):
        call()
    torch.cuda.synchronize()
    print(f"first call of everything {time.perf_counter() - start:.1f} s")
    del warm
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth:.0f} GB/s")
    if "check" in wanted:
        for shape in (
            (2048, 4, 4096),
            (300, 4, 5129),
            (300, 2, 1280),
            (300, 8, 1280),
            (100, 16, 640),
            (100, 3, 7),
        ):
            check(*shape, torch.bfloat16)
        check(1024, 4, 4096, torch.float32)
        check(1024, 4, 4096, torch.float16)
        invariance(4, 4096, torch.bfloat16)
        invariance(4, 1280, torch.float32)
        invariance(3, 129, torch.bfloat16)
    if "time" in wanted:
        timings(8192, 4, 4096, torch.bfloat16, bandwidth)
    if "more" in wanted:
        timings(8192, 4, 2560, torch.bfloat16, bandwidth)
        timings(8192, 4, 7168, torch.bfloat16, bandwidth)
        timings(8192, 2, 4096, torch.bfloat16, bandwidth)
        timings(8192, 8, 4096, torch.bfloat16, bandwidth)
        timings(8192, 4, 4096, torch.float32, bandwidth)
        timings(2048, 4, 4096, torch.bfloat16, bandwidth)
    if "few" in wanted:
        few()
    if "tiles" in wanted:
        all_tiles(8192)


if __name__ == "__main__":
    main()
