"""What the kernels share: token views, launch guards, and sums and products that keep float32's accuracy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl

from mhc_compile.forms import SymbolicLayout
from mhc_compile.kernels import gpus, products_are_exact

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# Triton has these, too, but for constants of kernels: on a host each call takes some microseconds.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()


def expected(tokens: int) -> int:
    """The number of tokens by which to decide how work is cut; where it is symbolic, as many as a GPU has work with.

    How many programs a launch has may follow from a symbolic number, what each of them does may not.
    """
    return tokens if isinstance(tokens, int) else 8192


def _near(t: torch.Tensor, inner: int) -> bool:
    """Whether the offsets within a token, which kernels count in 32 bits, stay below 2^31.

    Raises SymbolicLayout where that depends on a symbolic size.
    """
    offset = 0
    for d in range(-inner, 0):
        offset += t.shape[d] * t.stride(d)
    if not isinstance(offset, int):
        raise SymbolicLayout(f"how far apart a token's streams lie, {offset}, depends on a symbolic size")
    return offset < 1 << 31


def _flat_shape(t: torch.Tensor, inner: int) -> tuple[int, ...]:
    """[M, *inner dims]; M is multiplied out, because 0 tokens leave -1 ambiguous."""
    lead = t.dim() - inner
    tokens = 1
    for size in t.shape[:lead]:
        tokens *= size
    return (tokens, *t.shape[lead:])


def token_view(t: torch.Tensor, inner: int) -> torch.Tensor:
    """View [..., *inner dims] as [M, *inner dims]; copies only where the leading strides do not collapse.

    It also copies where the streams of a token are further apart than 2^31 elements.
    """
    # What does not collapse are streams between two token dimensions, [b, n, s, C] seen as [b, s, n, C], with b > 1.
    # Kernels that find a token by two strides could save the copy, which moves 2n units, while an operator moves 9 to
    # 14. Each of them would then divide by s for each token, take two more strides for each of x, x', dx and their
    # gradients, and be compiled once more. Models that store streams so pay for the copy; no other layout does.
    if not _near(t, inner):
        t = t.contiguous()
    return t if t.dim() == inner + 1 else t.reshape(_flat_shape(t, inner))


def _rows(t: torch.Tensor, inner: int) -> torch.Tensor | None:
    """What `token_view` returns without a copy, or None."""
    if not _near(t, inner):
        return None
    if t.dim() == inner + 1:
        return t
    try:
        return t.view(_flat_shape(t, inner))
    except (RuntimeError, ValueError):  # the second of fake tensors
        return None


def room_like(t: torch.Tensor, inner: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for a result with the strides of t, as torch.empty_like gives them, and its rows [M, *inner dims] to fill.

    Rows of which there is no view are memory of their own, which `put_back` copies.
    """
    whole = torch.empty_like(t, dtype=dtype)
    rows = _rows(whole, inner)
    return whole, torch.empty(_flat_shape(t, inner), dtype=whole.dtype, device=t.device) if rows is None else rows


def put_back(whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The result whose rows, got from `room_like`, are filled."""
    if rows is not whole and _rows(whole, rows.dim() - 1) is None:
        whole.copy_(rows.view(whole.shape))
    return whole


def gradient_like(t: torch.Tensor, inner: int, needed: bool) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """`room_like` for a gradient of t, and the strides of its rows; nothing where it is not needed."""
    if not needed:
        empty = nothing(t)
        return empty, empty, (0,) * (inner + 1)
    whole, rows = room_like(t, inner)
    return whole, rows, rows.stride()


def gradient_onto(
    d_x: torch.Tensor | None, x: torch.Tensor, needed: bool, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the gradient of x [..., n, C], and its rows: with in_place that of d_x, which is added, if it lies so.

    For kernels in which a program reads d_x where it writes, and nowhere else.
    """
    if in_place and needed and d_x is not None and d_x.stride() == x.stride() and d_x.dtype == x.dtype:
        return d_x, token_view(d_x, 2)
    return gradient_like(x, 2, needed)[:2]


def laid_out_as(t: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """t [..., n, C] as rows are, so that one offset serves both; a copy only where it is not."""
    if t is None:
        return None
    view = token_view(t, 2)
    if view.stride() == rows.stride():
        return view
    return torch.empty_strided(rows.shape, rows.stride(), dtype=t.dtype, device=t.device).copy_(view)


def on_device(t: torch.Tensor) -> AbstractContextManager[object]:
    """The context in which kernels launch on t's device; free of cost when that is the current one."""
    if not t.is_cuda or _recorder.get() is not None or t.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(t.device)


# How kernels were measured. Triton 3.9 warns where nothing is said, and 3.10 is to have another default.
FUSED = {"enable_fp_fusion": True}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start a Triton kernel on these programs; every launch of the package goes through here."""
    record = _recorder.get()
    if record is None:
        kernel[grid](*args, **FUSED, **options)
    else:
        record(kernel, grid, args, options)


Recorder = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]
_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
_replayed: ContextVar[bool] = ContextVar("replayed", default=False)


@contextlib.contextmanager
def recorded(recorder: Recorder, *, replayed: bool = False) -> Iterator[None]:
    """Hand every `launch` of this thread to recorder(kernel, grid, args, options) in place of the GPU.

    replayed: they will be launched by a CUDA graph.
    """
    tokens = _recorder.set(recorder), _replayed.set(replayed)
    try:
        yield
    finally:
        _recorder.reset(tokens[0])
        _replayed.reset(tokens[1])


def launched_by_host(device: torch.device) -> bool:
    """Whether the host launches each kernel; a CUDA graph does not need it to."""
    if _recorder.get() is not None:
        return not _replayed.get()
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def blocks_each(width: int, block: int, tokens: int, tile: int, waves: int, device: torch.device) -> int:
    """Column blocks for one program, so that with tiles of `tile` tokens each processor has about `waves` programs."""
    tiles = cdiv(expected(tokens), tile)
    programs = max(1, min(cdiv(waves * gpus.processors(device), tiles), cdiv(width, block)))
    return cdiv(cdiv(width, programs), block)


def share_tokens(tokens: int, splits: int, tile: int) -> tuple[int, int]:
    """How many programs share the tokens, `splits` at most, and how many tokens, in whole tiles, each of them takes."""
    each = cdiv(cdiv(tokens, splits), tile) * tile
    # Without tokens a program's sums are zeros: a symbolic number leaves the splits as they are.
    return (cdiv(tokens, each) if isinstance(tokens, int) else splits), each


def nothing(t: torch.Tensor) -> torch.Tensor:
    """What a backward returns in place of a gradient that nobody needs."""
    return t.new_empty(0)


def tile_sums(tiles: int, each: int, t: torch.Tensor) -> torch.Tensor:
    """Room on t's device for sums of tiles, [tiles, each], in one dimension: of symbolic tiles another would be asked
    whether it is 1.
    """
    return torch.empty(tiles * each, dtype=torch.float32, device=t.device)


def empty_gradient(t: torch.Tensor | None, needed: bool, x: torch.Tensor) -> torch.Tensor:
    """Room for the gradient of t, contiguous whatever the strides of t; nothing where it is not needed."""
    if t is None or not needed:
        return nothing(x if t is None else t)
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def dot_precision() -> str:
    """How `dot_float32` multiplies, for what the user allows."""
    return "tf32x3" if products_are_exact() else "rounded"


def group_scale(scale: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether scale has one entry per group (pre, post, res) instead of one per row, as bias has."""
    return scale.numel() != bias.numel()


def wanted(needs: Sequence[bool], count: int) -> tuple[bool, ...]:
    """The flags of a backward, one for each of its `count` gradients."""
    if len(needs) != count:
        raise ValueError(f"needs: expected {count} bools, got {len(needs)}")
    return tuple(bool(n) for n in needs)


@triton.jit
def split_bf16(v):
    """Three bf16 values whose sum is the float32 v to its last bit, the largest first."""
    high = v.to(tl.bfloat16)
    rest = v - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def dot_bf16(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a @ b of bf16 operands. The interpreter, which would multiply bits, gets float32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def round_tf32(v):
    """v to the nearest value of tf32, ties away from zero; tensor cores would cut it."""
    bits = (v.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    # The NaN of CUDA has all bits set: the sum would carry into the sign.
    return tl.where(v == v, bits.to(tl.float32, bitcast=True), v)


@triton.jit
def dot_float32(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b of float32 operands, with tf32 products of rounded operands or as Triton's input_precision says."""
    if PRECISION == "rounded":
        return tl.dot(round_tf32(a), round_tf32(b), acc, input_precision="tf32")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def add_rounded(part, total):
    """total + part rounded as float32 does.

    Tensor cores truncate as they accumulate, which over long sums costs more than float32's own rounding.
    A plain sum would be folded into the accumulator of the dot that made `part`.
    """
    return tl.fma(part, 1.0, total)
