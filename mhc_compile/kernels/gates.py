"""Device functions of the gates: the RMS factor, scale and bias, and Sinkhorn with its backward.

Tokens lie on the last axis of every tile ([n, n, tokens]): a sum over streams stays inside one thread.
Tiles are padded to a power of two in n; padded entries hold 0 (log domain: -inf) and are never divided by.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_factor(ms, eps, MODE: tl.constexpr):
    """r of forms.Rms."""
    if MODE == "inside":
        return 1.0 / tl.sqrt(ms + eps)
    elif MODE == "outside":
        return 1.0 / (tl.sqrt(ms) + eps)
    else:
        return 1.0 / tl.maximum(tl.sqrt(ms), eps)


@triton.jit
def rms_gradient(r_dr, ms, r, eps, MODE: tl.constexpr):
    """d ms of r * dr; where the root of ms = 0 has no derivative it is taken as 0.

    dr is of the size of the token and more, so that it would overflow where squares do; r * dr is of none.
    """
    if MODE == "inside":
        return -0.5 * (r_dr * r * r)
    else:
        root = tl.sqrt(ms)
        moving = root > 0.0
        if MODE == "clamp":
            moving = moving & (root >= eps)
        return tl.where(moving, -0.5 * (r_dr * r / tl.where(moving, root, 1.0)), 0.0)


@triton.jit
def affine(scale, bias, k, mask, group, GROUPED: tl.constexpr):
    """scale and bias of the rows k of phi, which belong to `group` (of pre, post, res)."""
    b = tl.load(bias + k, mask=mask, other=0.0).to(tl.float32)
    if GROUPED:
        return tl.load(scale + group + k * 0, mask=mask, other=0.0).to(tl.float32), b
    else:
        return tl.load(scale + k, mask=mask, other=0.0).to(tl.float32), b


@triton.jit
def _divisor(p, valid, eps, AXIS: tl.constexpr, CLAMP: tl.constexpr):
    total = tl.sum(p, axis=AXIS, keep_dims=True)
    if CLAMP:
        total = tl.maximum(total, eps)
    else:
        total = total + eps
    return tl.where(valid, total, 1.0)


@triton.jit
def _log_sum(p, valid, AXIS: tl.constexpr):
    top = tl.max(p, axis=AXIS, keep_dims=True)
    top = tl.where(valid, top, 0.0)
    total = tl.sum(tl.exp(p - top), axis=AXIS, keep_dims=True)
    return tl.where(valid, top + tl.log(tl.where(valid, total, 1.0)), 0.0)


@triton.jit
def _half_step(p, index, valid, eps, history, step, tok, live, M, N: tl.constexpr, AXIS: tl.constexpr,
               CLAMP: tl.constexpr, LOG: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    if LOG:
        d = _log_sum(p, valid, AXIS)
        p = p - d
    else:
        d = _divisor(p, valid, eps, AXIS, CLAMP)
        p = p * (1.0 / d)
    if KEEP:
        tl.store(history + (step * N + index) * M + tok, d, mask=valid & live)
    return p


@triton.jit
def _divisor_of(index, valid, history, step, tok, live, M, N: tl.constexpr, LOG: tl.constexpr):
    return tl.load(history + (step * N + index) * M + tok, mask=valid & live, other=0.0 if LOG else 1.0)


@triton.jit
def _half_step_backward(p, dp, d, eps, AXIS: tl.constexpr, CLAMP: tl.constexpr, LOG: tl.constexpr):
    """Undo one half step of divisor d: from (P_k, dP_k) to (P_{k-1}, dP_{k-1}), where P_{k-1} = P_k * d."""
    if LOG:
        return p + d, dp - tl.exp(p) * tl.sum(dp, axis=AXIS, keep_dims=True)
    else:
        through_sum = tl.sum(dp * p, axis=AXIS, keep_dims=True)
        if CLAMP:
            through_sum = tl.where(d > eps, through_sum, 0.0)
        return p * d, (dp - through_sum) * (1.0 / d)


@triton.jit
def _top(logits, i, o, N: tl.constexpr, FIRST: tl.constexpr):
    """The largest of what is normalised first."""
    if FIRST == "rows":
        return tl.where(i < N, tl.max(logits, axis=1, keep_dims=True), 0.0)
    else:
        return tl.where(o < N, tl.max(logits, axis=0, keep_dims=True), 0.0)


@triton.jit
def _shift(logits, i, o, N: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr):
    """What the form subtracts from the logits before exp."""
    top = _top(logits, i, o, N, FIRST)
    if START == "exp":
        return top
    elif START == "global_exp":
        return tl.max(tl.max(logits, axis=0, keep_dims=True), axis=1, keep_dims=True) + top * 0.0
    else:
        return top * 0.0


@triton.jit
def _start(logits, i, o, eps, start_eps, pairs, N: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr,
           LOG: tl.constexpr, ODD: tl.constexpr):  # fmt: skip
    """P_0 without start_eps (log domain: its logarithm) from logits that are -inf where padded, and a root.

    P_0 has the square of the root as a factor, which the first half step cancels if start_eps and eps have it too.
    It is as large as float32 holds beside these: with more of it P_0's largest entries would be 1 again.
    """
    if START == "softmax":
        if LOG:
            return logits - _log_sum(logits, i < N, 1), 1.0
        else:
            top = tl.where(i < N, tl.max(logits, axis=1, keep_dims=True), 0.0)
            e = tl.exp(logits - top)
            total = tl.where(i < N, tl.sum(e, axis=1, keep_dims=True), 1.0)
            return e / total, 1.0
    elif LOG:
        return logits - _shift(logits, i, o, N, START, FIRST), 1.0
    elif START == "exp":
        return tl.exp(logits - _top(logits, i, o, N, FIRST)), 1.0
    else:
        shift = _shift(logits, i, o, N, START, FIRST)
        top = _top(logits, i, o, N, FIRST)
        if not ODD:
            top = tl.where(pairs > 0, top, shift)
        most = 82.5 - tl.log(tl.maximum(tl.maximum(eps, start_eps), 1e-30))
        more = shift - top
        p = tl.exp(tl.where(more < most, logits - top, logits - shift + most))
        return p, tl.exp(0.5 * tl.minimum(more, most))


@triton.jit
def _beside_start(eps, root, START: tl.constexpr, LOG: tl.constexpr):
    if LOG or START == "softmax" or START == "exp":
        return eps
    else:
        return eps * root * root


@triton.jit
def _start_backward(logits, dp, i, o, eps, start_eps, pairs, N: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr,
                    LOG: tl.constexpr, ODD: tl.constexpr):  # fmt: skip
    """d logits from dP_0 (log domain: from d log P_0). A maximum shares its gradient among ties."""
    if START == "softmax":
        p, _ = _start(logits, i, o, eps, start_eps, pairs, N, START, FIRST, LOG, ODD)
        if LOG:
            return dp - tl.exp(p) * tl.sum(dp, axis=1, keep_dims=True)
        else:
            return p * (dp - tl.sum(dp * p, axis=1, keep_dims=True))
    else:
        AXIS: tl.constexpr = 1 if FIRST == "rows" else 0
        if not LOG:
            p, _ = _start(logits, i, o, eps, start_eps, pairs, N, START, FIRST, LOG, ODD)
            dp = dp * p
        if START == "plain_exp":
            return dp
        top = _shift(logits, i, o, N, START, FIRST)
        at_top = ((logits == top) & (i < N) & (o < N)).to(tl.float32)
        ties = tl.sum(at_top, axis=AXIS, keep_dims=True)
        through_top = tl.sum(dp, axis=AXIS, keep_dims=True)
        if START == "global_exp":
            ties = tl.sum(ties, axis=1 - AXIS, keep_dims=True)
            through_top = tl.sum(through_top, axis=1 - AXIS, keep_dims=True)
        return dp - at_top / tl.maximum(ties, 1.0) * through_top


@triton.jit
def _eps_now(eps, first_eps, is_first, START: tl.constexpr, LOG: tl.constexpr):
    if LOG or START == "softmax" or START == "exp":
        return eps
    else:
        return tl.where(is_first, first_eps, eps)


@triton.jit
def sinkhorn(logits, i, o, eps, start_eps, pairs, history, tok, live, M, N: tl.constexpr, START: tl.constexpr,
             FIRST: tl.constexpr, CLAMP: tl.constexpr, LOG: tl.constexpr, ODD: tl.constexpr,
             KEEP: tl.constexpr):  # fmt: skip
    """The iterate after 2 * pairs + ODD half steps (its logarithm in the log domain) [NP, NP, T].

    logits [NP, NP, T] are -inf where padded; i [NP, 1, 1], o [1, NP, 1], tok and live [1, 1, T].
    KEEP stores every divisor in history [steps, N, M] for sinkhorn_backward.
    """
    rows = i < N
    columns = o < N
    p, root = _start(logits, i, o, eps, start_eps, pairs, N, START, FIRST, LOG, ODD)
    first_eps = _beside_start(eps, root, START, LOG)
    if not LOG:
        p = tl.where(rows & columns, p + _beside_start(start_eps, root, START, LOG), 0.0)
    for pair in range(0, pairs):
        now = _eps_now(eps, first_eps, pair == 0, START, LOG)
        if FIRST == "rows":
            p = _half_step(p, i, rows, now, history, 2 * pair, tok, live, M, N, 1, CLAMP, LOG, KEEP)
            p = _half_step(p, o, columns, eps, history, 2 * pair + 1, tok, live, M, N, 0, CLAMP, LOG, KEEP)
        else:
            p = _half_step(p, o, columns, now, history, 2 * pair, tok, live, M, N, 0, CLAMP, LOG, KEEP)
            p = _half_step(p, i, rows, eps, history, 2 * pair + 1, tok, live, M, N, 1, CLAMP, LOG, KEEP)
    if ODD:
        now = _eps_now(eps, first_eps, pairs == 0, START, LOG)
        if FIRST == "rows":
            p = _half_step(p, i, rows, now, history, 2 * pairs, tok, live, M, N, 1, CLAMP, LOG, KEEP)
        else:
            p = _half_step(p, o, columns, now, history, 2 * pairs, tok, live, M, N, 0, CLAMP, LOG, KEEP)
    return p


@triton.jit
def sinkhorn_backward(logits, dp, i, o, eps, start_eps, pairs, history, tok, live, M, N: tl.constexpr,
                      START: tl.constexpr, FIRST: tl.constexpr, CLAMP: tl.constexpr, LOG: tl.constexpr,
                      ODD: tl.constexpr):  # fmt: skip
    """d logits [NP, NP, T] from dp, the gradient of the doubly stochastic result (0 where padded)."""
    rows = i < N
    columns = o < N
    p = sinkhorn(logits, i, o, eps, start_eps, pairs, history, tok, live, M, N, START, FIRST, CLAMP, LOG, ODD,
                 True)  # fmt: skip
    # Threads read divisors that others stored.
    tl.debug_barrier()
    if LOG:
        dp = dp * tl.exp(p)
    # Axis 1 sums a row, axis 0 a column; the last of a pair of half steps is undone first.
    _, root = _start(logits, i, o, eps, start_eps, pairs, N, START, FIRST, LOG, ODD)
    first_eps = _beside_start(eps, root, START, LOG)
    if ODD:
        now = _eps_now(eps, first_eps, pairs == 0, START, LOG)
        if FIRST == "rows":
            d = _divisor_of(i, rows, history, 2 * pairs, tok, live, M, N, LOG)
            p, dp = _half_step_backward(p, dp, d, now, 1, CLAMP, LOG)
        else:
            d = _divisor_of(o, columns, history, 2 * pairs, tok, live, M, N, LOG)
            p, dp = _half_step_backward(p, dp, d, now, 0, CLAMP, LOG)
    for back in range(0, pairs):
        step = 2 * (pairs - 1 - back)
        now = _eps_now(eps, first_eps, step == 0, START, LOG)
        if FIRST == "rows":
            d_last = _divisor_of(o, columns, history, step + 1, tok, live, M, N, LOG)
            d_first = _divisor_of(i, rows, history, step, tok, live, M, N, LOG)
            p, dp = _half_step_backward(p, dp, d_last, eps, 0, CLAMP, LOG)
            p, dp = _half_step_backward(p, dp, d_first, now, 1, CLAMP, LOG)
        else:
            d_last = _divisor_of(i, rows, history, step + 1, tok, live, M, N, LOG)
            d_first = _divisor_of(o, columns, history, step, tok, live, M, N, LOG)
            p, dp = _half_step_backward(p, dp, d_last, eps, 1, CLAMP, LOG)
            p, dp = _half_step_backward(p, dp, d_first, now, 0, CLAMP, LOG)
    return _start_backward(logits, dp, i, o, eps, start_eps, pairs, N, START, FIRST, LOG, ODD)
