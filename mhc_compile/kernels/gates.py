"""Device functions of the gates: the RMS factor, scale and bias, and Sinkhorn with its backward.

Tokens lie on the last axis of every tile ([n, n, tokens]): a sum over streams stays inside one thread.
Tiles are padded to a power of two in n; padded entries hold 0 and are never divided by.

START, FIRST and the number of half steps are those of `forms.Sinkhorn.iterated`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The constants of `ops.sinkhorn`: the unit of matrices without eps, ln 2 in three parts, the largest distance.
_UNIT, _LOG2_UNIT, _LARGEST = tl.constexpr(2.0**-100), tl.constexpr(-100.0), tl.constexpr(1e30)
_LN2_HIGH, _LN2_MIDDLE = tl.constexpr(0.69140625), tl.constexpr(0.001739501953125)
_LN2_LOW = tl.constexpr(1.4286068202862268e-06)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
# With Triton 3.7, gradients of 8 streams that vanish were not 0. With 3.6 and 3.8 they are.
_HALVES_FIRST = tl.constexpr(triton.__version__.startswith("3.7."))
# exp of less is 0 in float32.
_LEAST_EXPONENT = tl.constexpr(-170.0)


@triton.jit
def rounded_product(x, y):
    """x * y for a sum over threads.

    Where a thread adds what another one has sent, a compiler may make one fma of its own product and the sum. Both
    threads then find different sums. A product that is an fma itself is rounded before.
    """
    return tl.fma(x, y, 0.0)


@triton.jit
def sum_of_halves(x, AXIS: tl.constexpr):
    """As `sum_along`, with one half added to the other first, until 4 numbers are left.

    A sum of 4 equal numbers is exact in any order. A sum of 8, one after the other, is rounded, so that gradients which
    vanish are not 0.
    """
    P: tl.constexpr = x.shape[0]
    Q: tl.constexpr = x.shape[1]
    T: tl.constexpr = x.shape[2]
    if x.shape[AXIS] <= 4:
        return tl.sum(x, axis=AXIS, keep_dims=True)
    elif AXIS == 0:
        return sum_of_halves(tl.sum(tl.reshape(x, [2, P // 2, Q, T]), axis=0), 0)
    else:
        return sum_of_halves(tl.sum(tl.reshape(x, [P, 2, Q // 2, T]), axis=1), 1)


@triton.jit
def sum_along(x, AXIS: tl.constexpr):
    """The sum along axis 0 or 1 of [P, Q, T], which stays as an axis of one."""
    if _HALVES_FIRST:
        return sum_of_halves(x, AXIS)
    else:
        return tl.sum(x, axis=AXIS, keep_dims=True)


@triton.jit
def _weighted_sum(d, p, AXIS: tl.constexpr):
    return sum_along(rounded_product(d, p), AXIS)


@triton.jit
def _larger(a, b):
    """The larger of two numbers; NaN if one of them is, as in torch. A GPU's own maximum would drop the NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """The largest number along an axis; NaN if one of them is."""
    return tl.reduce(x, AXIS, _larger, keep_dims=True)


@triton.jit
def _power_of_2(exponent):
    """2 to the power of a whole number, exactly; 0 for one below those of normal numbers."""
    return (tl.maximum(exponent + 127.0, 0.0).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _reduced(x):
    """k and the rest of x = k * ln 2 + rest, k whole and the rest below 1/2."""
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    return k, ((x - k * _LN2_HIGH) - k * _LN2_MIDDLE) - k * _LN2_LOW


@triton.jit
def exponential(x):
    """exp(x) for x <= 88. tl.exp multiplies x by 1 / ln 2 first: the larger x is, the more that rounding counts.

    2^k comes in two factors, so that a result below the normal numbers is rounded once.
    """
    k, rest = _reduced(_larger(x, _LEAST_EXPONENT))
    half = tl.floor(0.5 * k)
    return rounded_product(tl.exp(rest) * _power_of_2(half), _power_of_2(k - half))


@triton.jit
def sigmoid_and_slope(x):
    """1 / (1 + exp(-x)) and its derivative, without the difference 1 - sigmoid, which would cancel."""
    k, rest = _reduced(_larger(-tl.abs(x), _LEAST_EXPONENT))
    e = tl.exp(rest) * _power_of_2(k)
    inverse = 1.0 / (1.0 + e)
    return tl.where(x < 0.0, e, 1.0) * inverse, e * inverse * inverse


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return sigmoid_and_slope(x)[0]


@triton.jit
def rms_factor(ms, eps, MODE: tl.constexpr):
    """r of forms.Rms."""
    if MODE == "inside":
        return 1.0 / tl.sqrt(ms + eps)
    elif MODE == "outside":
        return 1.0 / (tl.sqrt(ms) + eps)
    elif MODE == "clamp":
        return 1.0 / _larger(tl.sqrt(ms), eps)
    else:
        # In the layout of ms, whatever its values are.
        return tl.where(ms > 0.0, 1.0, 1.0)


@triton.jit
def rms_gradient(r_dr, ms, r, eps, MODE: tl.constexpr):
    """d ms of r * dr; where the root of ms = 0 has no derivative it is taken as 0.

    dr is of the size of the token and more, so that it would overflow where squares do; r * dr is of none.
    """
    if MODE == "inside":
        return -0.5 * (r_dr * r * r)
    elif MODE == "none":
        return tl.where(ms > 0.0, 0.0, 0.0)
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
def in_units(p, START: tl.constexpr):
    """The matrix that START scales by 1 / _UNIT."""
    if START == "normalised":
        return p * _UNIT
    else:
        return p


@triton.jit
def _divisor(p, valid, eps, START: tl.constexpr, AXIS: tl.constexpr, CLAMP: tl.constexpr):
    total = sum_along(p, AXIS)
    if START == "normalised":
        total = in_units(total, START)
    elif CLAMP:
        total = _larger(total, eps)
    else:
        total = total + eps
    return tl.where(valid, total, 1.0)


@triton.jit
def _quotient(p, d):
    """p / d, rounded as eager's, with one reciprocal for all entries of a line.

    A half step then changes nothing where eager's changes nothing, and gradients that vanish there stay 0. Rounding the
    reciprocal and the product both would leave most sums next to 1.
    """
    inverse = 1.0 / d
    near = p * inverse
    return tl.fma(tl.fma(-near, d, p), inverse, near)


@triton.jit
def _half_step(p, index, valid, eps, history, step, tok, live, M, N: tl.constexpr, START: tl.constexpr,
               AXIS: tl.constexpr, CLAMP: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    d = _divisor(p, valid, eps, START, AXIS, CLAMP)
    p = _quotient(p, d)
    if KEEP:
        tl.store(history + (step * N + index) * M + tok, d, mask=valid & live)
    return p


@triton.jit
def _divisor_of(index, valid, history, step, tok, live, M, N: tl.constexpr):
    return tl.load(history + (step * N + index) * M + tok, mask=valid & live, other=1.0)


@triton.jit
def _centred(d, p, size, AXIS: tl.constexpr):
    """d - size * sum(d * p) along an axis along which size * p was normalised without eps, or size is 0.

    Where all gradients are equal, or one entry is near 1, the exact result is near 0, and the first sum leaves rounding
    errors of d. A second sum removes what these have in common. What the first subtraction rounds away is kept until
    then: a result that is not near 0 would be rounded twice, where eager rounds it once. The second sum nearly cancels,
    so it keeps what its products round away too.
    """
    first = size * _weighted_sum(d, p, AXIS)
    centred = d - first
    lost = (d - centred) - first
    products = rounded_product(centred, p)
    rounded_away = tl.fma(lost, p, tl.fma(centred, p, -products))
    second = sum_along(products, AXIS) + sum_along(rounded_away, AXIS)
    return centred + (lost - size * second)


@triton.jit
def _bounded(x):
    return _smaller(_larger(x, -_LARGEST_FLOAT), _LARGEST_FLOAT)


@triton.jit
def _half_step_backward(p, dp, d, eps, START: tl.constexpr, AXIS: tl.constexpr, CLAMP: tl.constexpr):
    """Undo one half step of divisor d: from (P_k, dP_k) to (P_{k-1}, dP_{k-1}), where P_{k-1} = P_k * d."""
    if START == "normalised":
        return p * d, _quotient(_centred(dp, in_units(p, START), 1.0, AXIS), d)
    else:
        if CLAMP:
            dp = _centred(dp, p, tl.where(d > eps, 1.0, 0.0), AXIS)
        else:
            dp = dp - _weighted_sum(dp, p, AXIS)
        # As `_quotient`. The gradient of an entry that has underflowed may overflow. Bounded, it counts as 0 and not as
        # 0 * inf, and inf - inf does not occur.
        inverse = 1.0 / d
        near = _bounded(dp * inverse)
        return p * d, _bounded(tl.fma(tl.fma(-near, d, dp), inverse, near))


@triton.jit
def _scaled_exponential(logits, valid, AXIS: tl.constexpr):
    """exp(logits - their maximum along the axis) as m * 2**k, with m next to 1 and k whole; logits may have any size.

    The rounding error of the difference is added to its exponent. Otherwise the exp of the logits themselves, which
    eager programs take, would be more accurate.
    """
    top = tl.where(valid, tl.max(logits, axis=AXIS, keep_dims=True), 0.0)
    finite = tl.where(logits == float("-inf"), -3e38, logits)
    x = finite - top
    moved = x - finite
    left = (finite - (x - moved)) - (top + moved)
    bounded = tl.maximum(x, -_LARGEST)
    left = tl.where(x == bounded, left, x)  # exp(-inf) is 0
    k, rest = _reduced(bounded)
    # A difference so large that it has no fraction leaves no rest either, but rounding errors above 1.
    rest = tl.minimum(tl.maximum(rest, -1.0), 1.0) + left
    return tl.exp(rest), k


@triton.jit
def _normalised(logits, i, o, pairs, N: tl.constexpr, FIRST: tl.constexpr, ODD: tl.constexpr):
    """The start "normalised", and the factors that its lines along FIRST are divided by.

    exp(logits) is normalised along the axis that FIRST does not name. Each line along FIRST is then divided by a power
    of 2, so that its largest entry is about 1 / _UNIT. The first half step cancels these factors. Without them a line
    of tiny entries would underflow; with them no sum of any half step is tiny. A factor may itself underflow to 0.
    """
    AXIS: tl.constexpr = 1 if FIRST == "rows" else 0
    valid = (o < N) if FIRST == "rows" else (i < N)
    m, k = _scaled_exponential(logits, valid, 1 - AXIS)
    total = tl.where(valid, _weighted_sum(m, _power_of_2(k), 1 - AXIS), 1.0)
    top = tl.max(k, axis=AXIS, keep_dims=True)
    if not ODD:
        top = tl.where(pairs > 0, top, 0.0)
    return m / total * _power_of_2(k - top - _LOG2_UNIT), _power_of_2(top)


@triton.jit
def _top(logits, i, o, N: tl.constexpr, FIRST: tl.constexpr):
    """The largest of what is normalised first."""
    if FIRST == "rows":
        return tl.where(i < N, _largest(logits, 1), 0.0)
    else:
        return tl.where(o < N, _largest(logits, 0), 0.0)


@triton.jit
def _shift(logits, i, o, N: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr):
    """What the form subtracts from the logits before exp."""
    top = _top(logits, i, o, N, FIRST)
    if START == "exp":
        return top
    elif START == "global_exp":
        return _largest(_largest(logits, 0), 1) + top * 0.0
    else:
        return top * 0.0


@triton.jit
def _start(logits, i, o, eps, start_eps, pairs, N: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr,
           ODD: tl.constexpr):  # fmt: skip
    """P_0 without start_eps from logits that are -inf where padded, and a root (of "normalised" the inverse powers).

    P_0 has the square of the root as a factor, which the first half step cancels if start_eps and eps have it too.
    It is as large as float32 allows: with more of it P_0's largest entries would be 1 again.
    """
    if START == "normalised":
        return _normalised(logits, i, o, pairs, N, FIRST, ODD)
    elif START == "softmax":
        top = tl.where(i < N, _largest(logits, 1), 0.0)
        e = exponential(logits - top)
        total = tl.where(i < N, sum_along(e, 1), 1.0)
        return e / total, 1.0
    elif START == "exp":
        return exponential(logits - _top(logits, i, o, N, FIRST)), 1.0
    else:
        shift = _shift(logits, i, o, N, START, FIRST)
        top = _top(logits, i, o, N, FIRST)
        if not ODD:
            top = tl.where(pairs > 0, top, shift)
        most = 82.5 - tl.log(tl.maximum(tl.maximum(eps, start_eps), 1e-30))
        more = shift - top
        p = exponential(tl.where(more < most, logits - top, logits - shift + most))
        return p, exponential(0.5 * _smaller(more, most))


@triton.jit
def _beside_start(eps, root, START: tl.constexpr):
    if START == "plain_exp" or START == "global_exp":
        return eps * root * root
    else:
        return eps


@triton.jit
def _start_backward(logits, dp, i, o, eps, start_eps, pairs, N: tl.constexpr, START: tl.constexpr, FIRST: tl.constexpr,
                    ODD: tl.constexpr):  # fmt: skip
    """d logits from dP_0. A maximum shares its gradient among ties."""
    AXIS: tl.constexpr = 1 if FIRST == "rows" else 0
    p, root = _start(logits, i, o, eps, start_eps, pairs, N, START, FIRST, ODD)
    if START == "normalised":
        p = in_units(p, START)
        return rounded_product(p, _centred(dp, p, root, 1 - AXIS))
    elif START == "softmax":
        return rounded_product(p, dp - _weighted_sum(dp, p, 1))
    else:
        if START == "plain_exp":
            return rounded_product(dp, p)
        top = _shift(logits, i, o, N, START, FIRST)
        at_top = ((logits == top) & (i < N) & (o < N)).to(tl.float32)
        ties = sum_along(at_top, AXIS)
        through_top = _weighted_sum(dp, p, AXIS)
        if START == "global_exp":
            ties = sum_along(ties, 1 - AXIS)
            through_top = sum_along(through_top, 1 - AXIS)
        return dp * p - at_top / tl.maximum(ties, 1.0) * through_top


@triton.jit
def _eps_now(eps, first_eps, is_first, START: tl.constexpr):
    if START == "plain_exp" or START == "global_exp":
        return tl.where(is_first, first_eps, eps)
    else:
        return eps


@triton.jit
def sinkhorn(logits, i, o, eps, start_eps, pairs, history, tok, live, M, N: tl.constexpr, START: tl.constexpr,
             FIRST: tl.constexpr, CLAMP: tl.constexpr, ODD: tl.constexpr, KEEP: tl.constexpr):  # fmt: skip
    """The iterate after 2 * pairs + ODD half steps [NP, NP, T], of which `in_units` makes the result.

    logits [NP, NP, T] are -inf where padded; i [NP, 1, 1], o [1, NP, 1], tok and live [1, 1, T].
    KEEP stores every divisor in history [steps, N, M] for sinkhorn_backward.
    """
    rows = i < N
    columns = o < N
    p, root = _start(logits, i, o, eps, start_eps, pairs, N, START, FIRST, ODD)
    first_eps = _beside_start(eps, root, START)
    if START != "normalised":
        p = tl.where(rows & columns, p + _beside_start(start_eps, root, START), 0.0)
    for pair in range(0, pairs):
        now = _eps_now(eps, first_eps, pair == 0, START)
        if FIRST == "rows":
            p = _half_step(p, i, rows, now, history, 2 * pair, tok, live, M, N, START, 1, CLAMP, KEEP)
            p = _half_step(p, o, columns, eps, history, 2 * pair + 1, tok, live, M, N, START, 0, CLAMP, KEEP)
        else:
            p = _half_step(p, o, columns, now, history, 2 * pair, tok, live, M, N, START, 0, CLAMP, KEEP)
            p = _half_step(p, i, rows, eps, history, 2 * pair + 1, tok, live, M, N, START, 1, CLAMP, KEEP)
    if ODD:
        now = _eps_now(eps, first_eps, pairs == 0, START)
        if FIRST == "rows":
            p = _half_step(p, i, rows, now, history, 2 * pairs, tok, live, M, N, START, 1, CLAMP, KEEP)
        else:
            p = _half_step(p, o, columns, now, history, 2 * pairs, tok, live, M, N, START, 0, CLAMP, KEEP)
    return p


@triton.jit
def sinkhorn_backward(logits, dp, i, o, eps, start_eps, pairs, history, tok, live, M, N: tl.constexpr,
                      START: tl.constexpr, FIRST: tl.constexpr, CLAMP: tl.constexpr,
                      ODD: tl.constexpr):  # fmt: skip
    """d logits [NP, NP, T] from dp, the gradient of the doubly stochastic result (0 where padded)."""
    rows = i < N
    columns = o < N
    p = sinkhorn(logits, i, o, eps, start_eps, pairs, history, tok, live, M, N, START, FIRST, CLAMP, ODD, True)
    # Threads read divisors that others stored.
    tl.debug_barrier()
    # Axis 1 sums a row, axis 0 a column; the last of a pair of half steps is undone first.
    _, root = _start(logits, i, o, eps, start_eps, pairs, N, START, FIRST, ODD)
    first_eps = _beside_start(eps, root, START)
    if ODD:
        now = _eps_now(eps, first_eps, pairs == 0, START)
        if FIRST == "rows":
            d = _divisor_of(i, rows, history, 2 * pairs, tok, live, M, N)
            p, dp = _half_step_backward(p, dp, d, now, START, 1, CLAMP)
        else:
            d = _divisor_of(o, columns, history, 2 * pairs, tok, live, M, N)
            p, dp = _half_step_backward(p, dp, d, now, START, 0, CLAMP)
    for back in range(0, pairs):
        step = 2 * (pairs - 1 - back)
        now = _eps_now(eps, first_eps, step == 0, START)
        if FIRST == "rows":
            d_last = _divisor_of(o, columns, history, step + 1, tok, live, M, N)
            d_first = _divisor_of(i, rows, history, step, tok, live, M, N)
            p, dp = _half_step_backward(p, dp, d_last, eps, START, 0, CLAMP)
            p, dp = _half_step_backward(p, dp, d_first, now, START, 1, CLAMP)
        else:
            d_last = _divisor_of(i, rows, history, step + 1, tok, live, M, N)
            d_first = _divisor_of(o, columns, history, step, tok, live, M, N)
            p, dp = _half_step_backward(p, dp, d_last, eps, START, 1, CLAMP)
            p, dp = _half_step_backward(p, dp, d_first, now, START, 0, CLAMP)
    return _start_backward(logits, dp, i, o, eps, start_eps, pairs, N, START, FIRST, ODD)
