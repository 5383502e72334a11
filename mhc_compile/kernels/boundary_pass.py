"""A boundary in one pass, in Gluon for Hopper: new streams stay in shared memory until their gates are known.

    x'[o] = h_post[o] f + sum_i h_res[i, o] x[i]     h = x' phi^T     layer_input = sum_o h_pre[o](h) x'[o]

Without the combine, where x' is given, it is `generate_mix_and_aggregate`.

h_pre needs all columns of a token, which are too many for one processor. So a team of programs works on the same tile
of tokens, each on 64 columns: it combines them, stores its part of h, keeps x' in shared memory and goes on to the
next tile. LAG tiles later the gates are there, and it weighs x'. In C-units of n = 4 that is 10, where
`combine_project` and the aggregate move 14; without the combine 5 in place of 9.

Who does what, in a program:
- `_stream`: combines, projects, and aggregates; waits for a tile's gates, each a number and the tile's tag in 8 bytes.
- `_announce`: counts the program in when its part of h can be read by others.
- `_add_up`: when all are counted, adds up the parts of a token (tokens are dealt out among the team) and hands out the
  gates. The order is that of `projection.partial_sum`, so the bits are the same. Only the end of the next sublayer
  needs h_post and h_res. They are made for 32 tokens at a time, one a thread, as in `mix`.

Programs of a team wait for each other, so all of them must run at once. There are two ways:

- Cooperative: a GPU begins the launch when there is room for all programs, and not before.
- Drawn, where communication may run beside it, for which the first way would wait: a program draws its place in a team
  as it begins, and full teams draw tiles, a few turns ahead. A team for which other kernels leave no room gives up, and
  its programs leave (`exchange.decided`). Tiles that nobody has drawn in the end are done by `boundary_rest`. So nobody
  waits for long for a program that has not begun.

No program overwrites what another may still read:

- A program stores its part of tile t + LAG + 1 in the place of tile t's, after it had the gates of tile t. These gates
  are sums of all parts of tile t.
- The gates of t + LAG + 1 take the place of those of t, after all programs have stored their parts of t + LAG + 1. Each
  program did so when all its threads had the gates of t.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mhc_compile.forms import Gates, Rms, Sinkhorn
from mhc_compile.kernels import combine_project, communicates, gpus
from mhc_compile.kernels.boundary_rest import boundary_rest_kernel
from mhc_compile.kernels.boundary_steps import (
    coefficients,
    dot,
    other_gates,
    pieces,
    room_for_phi,
    rows_before,
    rows_of,
    store_part,
)
from mhc_compile.kernels.common import (
    cdiv,
    expected,
    group_scale,
    launch,
    launched_by_host,
    next_power_of_2,
    on_device,
)
from mhc_compile.kernels.exchange import (
    answer,
    answer_of_one,
    ask,
    ask_for_one,
    count_in,
    decided,
    hand_out,
    number_when_tagged,
    wait_for,
)
from mhc_compile.kernels.gates import affine, rms_factor, sigmoid
from mhc_compile.kernels.one_pass import barrier, combined, copy_rows, split_phi
from mhc_compile.kernels.opaque import opaque
from mhc_compile.kernels.projection import GROUPS, parts_of

# Two programs share a processor, its registers and its shared memory.
TOKENS, WARPS = 32, 4
# As there, since the order of sums is that of its blocks.
COLUMNS = combine_project.MANY.columns
# Registers of a thread: 104 for those that add up, for which the others have 152 of their 128.
PROGRAMS_EACH, REGISTERS, REGISTERS_TO_ADD = 2, 128, 104
# By streams: tiles between a tile's projection and its aggregate, while its parts of h come and go, and tiles that are
# copied ahead. With a single tile between it takes an eighth more; for more there is no room with 4 streams. 2 gain
# nothing by more where they are combined, and a tenth where they are not.
LAGS = {2: (3, 1), 4: (2, 1)}
LAGS_ALONE = {2: (6, 2), 4: (2, 1)}
# The most tokens of a tile that a program adds up one after the other. Fewer than 449 columns have so few programs.
MOST_OWN = 4
# Tokens with which one pass takes the GPU less time than two: with fewer, what a program does once takes longer.
FEWEST = 384
# And where a program adds up more than one token of a tile.
FEWEST_OF_NARROW = 6144
# Where tiles are drawn: teams of which one may have no room, and a memory, in bytes a second, for which two passes over
# 4 streams take no longer.
FEWEST_TEAMS, FAST_MEMORY = 4, 4e12
# The most rows of phi: beside 4 streams there is shared memory for no more. Those that add up have registers for a
# few more.
MOST_ROWS = 24
# Turns whose tiles are known to a team at a time: more than lie between those that its programs are at.
RING = gl.constexpr(32)
# Nanoseconds that a program waits for its team: while no other team works, and while one does.
PATIENCE, PATIENCE_BESIDE = gl.constexpr(1_000_000), gl.constexpr(20_000)


@gluon.jit
def _fetch(x_s, f_s, turn, x, f, tile, start, M, C, N: gl.constexpr, STAGES: gl.constexpr, F_STAGES: gl.constexpr,
           BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr, TILE: gl.constexpr):  # fmt: skip
    """Start copying the columns from `start` on of a tile of tokens: x, one stream after the other, and f."""
    c = (start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
    tok = gl.arange(0, BLOCK_M, gl.SliceLayout(1, TILE)).to(gl.int64)[:, None] + tile
    mask = (tok < M) & (c < C)
    copy_rows(x_s, f_s, turn % STAGES, turn % F_STAGES, x, f, tok, c, mask, C, N, BLOCK_M)
    async_copy.commit_group()


@gluon.jit
def _tile_of(turn, order, team, teams, DRAWN: gl.constexpr):
    """The tile of a team's turn; if there are no more, the number of tiles or more, and no later turn may be asked."""
    if DRAWN:
        return number_when_tagged(order + turn % RING, turn + 1)
    return team + turn * teams


@gluon.jit
def _stream(f, h_post, x, h_res, out, layer_input, parts, gates, order, stored, x_s, f_s, phi_s, first_tiles, team,
            teams, rank, ranks, tiles, tokens, C, N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr,
            ROWS: gl.constexpr, DRAWN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
            LAG: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Combine, project, and LAG tiles later aggregate the columns of this program, tile by tile."""
    COMBINE: gl.constexpr = f is not None
    LANES: gl.constexpr = BLOCK_C // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TOKEN: gl.constexpr = gl.SliceLayout(1, TILE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [BLOCK_M // 16, WARPS // (BLOCK_M // 16)], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    STAGES: gl.constexpr = AHEAD + 1 + LAG
    SLOTS: gl.constexpr = LAG + 1
    SLOT: gl.constexpr = BLOCK_M * ROWS
    start = rank * BLOCK_C
    row = gl.arange(0, BLOCK_M, TOKEN)
    row_h = gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA))[:, None]
    c = (start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
    inside = c < C
    post = ()
    res = ()
    if COMBINE:
        post, res = coefficients(h_post, h_res, row + first_tiles[0].to(gl.int64) * BLOCK_M, tokens, N)
    # The tiles of the last LAG turns, of this one and of the next AHEAD.
    of_turns = ()
    for _ in gl.static_range(LAG):
        of_turns = of_turns + (tiles,)
    of_turns = of_turns + first_tiles
    turn = 0
    # Turns in which there is something to do.
    turns = gl.where(first_tiles[0] < tiles, LAG + 1, 0)
    while turn < turns:
        stage = turn % STAGES
        # Asked for now, since the answer takes a while.
        gates_then = ask(gates + ((turn + 1) % SLOTS * BLOCK_M + row) * N, N)
        tile = of_turns[LAG]
        next_tile = of_turns[LAG + AHEAD]
        if tile < tiles:
            if DRAWN:
                order_then = ask_for_one(order + (turn + AHEAD + 1) % RING)
            tok = row + tile.to(gl.int64) * BLOCK_M
            _fetch(x_s, f_s, turn + AHEAD, x, f, next_tile.to(gl.int64) * BLOCK_M, start, tokens, C, N, STAGES,
                   AHEAD + 1, BLOCK_M, BLOCK_C, TILE)  # fmt: skip
            async_copy.wait_group(AHEAD)
            barrier()
            mask = (tok < tokens)[:, None] & inside
            if COMBINE:
                out_at = out + tok[:, None] * (N * C) + c
                f_row = f_s.index(turn % (AHEAD + 1)).load(TILE).to(gl.float32)
            old = ()
            for i in gl.static_range(N):
                old = old + (x_s[i].index(stage).load(TILE),)
            terms = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE)
            for o in gl.static_range(N):
                new = old[o]
                if COMBINE:
                    new = combined(post, res, f_row, old, o, N).to(gl.bfloat16)
                    # A thread reads of x what it copied, and overwrites it.
                    x_s[o].index(stage).store(new)
                v = new.to(gl.float32)
                terms = gl.fma(v, v, terms)
            at_part = parts + (turn % SLOTS * ranks + rank) * SLOT
            gl.store(at_part + row * ROWS + K, gl.sum(terms, axis=1))
            if COMBINE:
                post, res = coefficients(h_post, h_res, row + of_turns[LAG + 1].to(gl.int64) * BLOCK_M, tokens, N)
                barrier()
            sums = ()
            for piece in gl.static_range(pieces(K)):
                zero = gl.zeros([BLOCK_M, rows_of(piece, K)], gl.float32, MMA)
                sums = sums + ((zero, zero),)
            for o in gl.static_range(N):
                left = x_s[o].index(stage).load(LEFT)
                more = ()
                for piece in gl.static_range(pieces(K)):
                    small, large = sums[piece]
                    more = more + (dot(left, phi_s[piece], o, small, large, PARTS, rows_of(piece, K), RIGHT),)
                sums = more
            for piece in gl.static_range(pieces(K)):
                small, large = sums[piece]
                store_part(at_part, row_h, large + small, rows_before(piece, K), rows_of(piece, K), K, ROWS, MMA)
            barrier()
            mbarrier.arrive(stored.index(turn % STAGES), count=1)
            if COMBINE:
                # Last, since others wait for the sums.
                for o in gl.static_range(N):
                    gl.store(out_at + o * C, x_s[o].index(stage).load(TILE), mask=mask)
            if DRAWN:
                next_tile = answer_of_one(order_then, order + (turn + AHEAD + 1) % RING, turn + AHEAD + 2)
            else:
                next_tile += teams
        if of_turns[0] < tiles:
            tok_then = row + of_turns[0].to(gl.int64) * BLOCK_M
            tag = gl.zeros_like(row) + (turn - LAG + 1)
            h_pre = answer(gates_then, tag, N)
            acc = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE)
            for o in gl.static_range(N):
                acc += h_pre[o][:, None] * x_s[o].index((turn - LAG) % STAGES).load(TILE).to(gl.float32)
            gl.store(layer_input + tok_then[:, None] * C + c, acc.to(layer_input.dtype.element_ty),
                     mask=(tok_then < tokens)[:, None] & inside)  # fmt: skip
        turn += 1
        if of_turns[LAG + 1] < tiles:
            turns = turn + LAG + 1
        of_turns = of_turns[1:] + (next_tile,)
    async_copy.wait_group(0)


@gluon.jit
def _announce(stored, counts, order, drawn, first_tile, draws, team, teams, rank, ranks, tiles, DRAWN: gl.constexpr,
              STAGES: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Count this program in for each of its tiles, when all of its part has been stored; the last also draws tiles.

    Tiles SLOTS turns apart have a counter in common: nobody stores its part of the later one before there are the
    earlier one's gates, and so all of its parts.
    """
    turn = 0
    tile = first_tile
    while tile < tiles:
        if DRAWN and rank == ranks - 1:
            _publish(order, turn + draws, gl.atomic_add(drawn, 1, sem="relaxed", scope="gpu"), tiles)
        mbarrier.wait(stored.index(turn % STAGES), turn // STAGES & 1)
        count_in(counts + turn % SLOTS)
        turn += 1
        tile = _tile_of(turn, order, team, teams, DRAWN)


@gluon.jit
def _begin(state, drawn, order, draws, tiles):
    """Draw a team's first tiles, now that its last program has come, unless it has given up."""
    zero = gl.to_tensor(0).to(gl.int64)
    if gl.atomic_cas(state, zero, zero + 1, sem="relaxed", scope="gpu") == 0:
        first = gl.atomic_add(drawn, draws.to(gl.int64), sem="relaxed", scope="gpu")
        for turn in range(draws):
            _publish(order, turn, first + turn, tiles)


@gluon.jit
def _publish(order, turn, tile, tiles):
    """Let the team know which tile a turn has."""
    both = gl.minimum(tile, tiles.to(gl.int64)) | ((turn + 1).to(gl.int64) << 32)
    # A store that others may see half done would not do.
    gl.atomic_xchg(order + turn % RING, both, sem="relaxed", scope="gpu")


@gluon.jit
def _add_up(parts, gates, counts, order, scale, bias, h, ms, next_post, next_res, first_tile, team, teams, rank, ranks,
            tiles, tokens, inverse_columns, rms_eps, pre_eps, post_mult, post_eps, sinkhorn_eps, start_eps, pairs,
            N: gl.constexpr, K: gl.constexpr, GATES: gl.constexpr, ROWS: gl.constexpr, RMS_MODE: gl.constexpr,
            START: gl.constexpr, FIRST: gl.constexpr, CLAMP: gl.constexpr, ODD: gl.constexpr, GROUPED: gl.constexpr,
            GROUPS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr, OWN: gl.constexpr, DRAWN: gl.constexpr,
            BLOCK_M: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """h, ms and the gates of the tokens that are this program's: h_pre, for the team, at once, the others 32 by 32."""
    SUMS: gl.constexpr = gl.BlockedLayout([1, ROWS * GROUPS // 32], [GROUPS, 32 // GROUPS], [1, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([GROUPS, 1], [1, 32], [1, 1], [1, 0])
    SLOT: gl.constexpr = BLOCK_M * ROWS
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, SUMS))[:, None]
    column = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    k = gl.arange(0, ROWS, gl.SliceLayout(0, WHOLE))
    of_group = gl.arange(0, GROUPS, gl.SliceLayout(1, WHOLE))[:, None]
    gate_scale, gate_bias = affine(scale, bias, k, k < N, 0, GROUPED)
    # A tile's tokens are dealt out; where there are more programs than these, they take turns.
    rounds = gl.maximum(ranks // BLOCK_M, 1)
    mine_first = rank // rounds
    lane = gl.arange(0, 32, gl.SliceLayout(0, WHOLE))
    r_of = ()
    for _ in gl.static_range(OWN):
        r_of = r_of + (gl.zeros([32], gl.float32, gl.SliceLayout(0, WHOLE)),)
    # The tiles of 32 turns, beside r; those that are not there follow the last.
    of_turns = gl.zeros_like(lane) + tiles
    if (mine_first < BLOCK_M) & (first_tile < tiles):
        turn = rank % rounds
        tile = _tile_of(turn, order, team, teams, DRAWN)
        while tile < tiles:
            done = turn // rounds % 32
            wait_for(counts + turn % SLOTS, ranks * (turn // SLOTS + 1), k)
            r_now = ()
            for own in gl.static_range(OWN):
                t = mine_first + own * ranks
                ours = t < BLOCK_M
                blocks = ()
                for block in gl.static_range(CHUNKS * CHUNK):
                    of = block * GROUPS + group
                    at = parts + (turn % SLOTS * ranks + of) * SLOT + t * ROWS + column
                    blocks = blocks + (gl.load(at, mask=(of < ranks) & ours, other=0.0, cache_modifier=".cg"),)
                of_groups = gl.zeros([GROUPS, ROWS], gl.float32, SUMS)
                for chunk in gl.static_range(CHUNKS):
                    of_chunk = blocks[chunk * CHUNK]
                    for block in gl.static_range(1, CHUNK):
                        of_chunk += blocks[chunk * CHUNK + block]
                    of_groups += of_chunk
                of_groups = gl.convert_layout(of_groups, WHOLE)
                total = gl.zeros_like(k).to(gl.float32)
                # One after the other, as in `partial_sum`: in which order a sum over an axis adds depends on Triton.
                for one in gl.static_range(GROUPS):
                    total += gl.sum(gl.where(of_group == one, of_groups, 0.0), axis=0)
                mean = gl.sum(gl.where(k == K, total, 0.0), axis=0) * inverse_columns
                r = rms_factor(mean, rms_eps, RMS_MODE)
                # As in `mix`, to the bit.
                gate = sigmoid(r * total * gate_scale + gate_bias) + pre_eps
                at_gates = gates + (turn % SLOTS * BLOCK_M + t) * N + k
                hand_out(at_gates, gate, gl.zeros_like(k) + (turn + 1), (k < N) & ours)
                tok = tile.to(gl.int64) * BLOCK_M + t
                gl.store(h + tok * K + k, total, mask=(k < K) & ours & (tok < tokens))
                gl.store(ms + tok, mean, mask=ours & (tok < tokens))
                # Not made again of ms: a compiler may have put the product for ms and the sum with eps into one.
                r_now = r_now + (gl.where(lane == done, r, r_of[own]),)
            r_of = r_now
            of_turns = gl.where(lane == done, tile, of_turns)
            turn += rounds
            tile = _tile_of(turn, order, team, teams, DRAWN)
            if (done == 31) | (tile >= tiles):
                # Threads read what others stored.
                barrier()
                for own in gl.static_range(OWN):
                    t = mine_first + own * ranks
                    toks = gl.where(t < BLOCK_M, of_turns, tiles).to(gl.int64) * BLOCK_M + t
                    other_gates(h, r_of[own], toks, scale, bias, next_post, next_res, tokens, post_mult, post_eps,
                                sinkhorn_eps, start_eps, pairs, N, K, GATES, START, FIRST, CLAMP, ODD, GROUPED,
                                1)  # fmt: skip
                of_turns = gl.zeros_like(lane) + tiles


@opaque("out", "layer_input", "next_post", "next_res", "h", "ms", "parts", "flags")
@gluon.jit(do_not_specialize=["M", "pairs"])
def boundary_pass_kernel(f, h_post, x, h_res, phi, norm_weight, scale, bias, out, layer_input, next_post, next_res, h,
                         ms, parts, flags, M, C, phi_k, phi_c, teams, inverse_columns, rms_eps, pre_eps, post_mult,
                         post_eps, sinkhorn_eps, start_eps, pairs, N: gl.constexpr, K: gl.constexpr,
                         GATES: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, HAS_NORM: gl.constexpr,
                         RMS_MODE: gl.constexpr, START: gl.constexpr, FIRST: gl.constexpr, CLAMP: gl.constexpr,
                         ODD: gl.constexpr, GROUPED: gl.constexpr, GROUPS: gl.constexpr, CHUNKS: gl.constexpr,
                         CHUNK: gl.constexpr, OWN: gl.constexpr, DRAWN: gl.constexpr, BLOCK_M: gl.constexpr,
                         BLOCK_C: gl.constexpr, LAG: gl.constexpr, AHEAD: gl.constexpr, WARPS: gl.constexpr,
                         REGISTERS_TO_ADD: gl.constexpr):  # fmt: skip
    """out [M, n, C], layer_input [M, C], next_post [M, n], next_res [M, n, n], h [M, K] and ms [M].

    parts [teams, LAG + 1, ranks, BLOCK_M, ROWS]: of h, in column K of the squares, and then nothing. flags, zero at
    first: gates [teams, LAG + 1, BLOCK_M, n], and [teams, LAG + 1] how many parts of tiles have been stored. Where
    tiles are DRAWN, also the tiles of turns [teams, RING], whether a team is full (1) or has given up (2) [teams], how
    many places in teams are taken, and how many tiles.
    """
    LANES: gl.constexpr = BLOCK_C // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    # Tiles on their way, one at work, and those that wait for their gates.
    STAGES: gl.constexpr = AHEAD + 1 + LAG
    SLOTS: gl.constexpr = LAG + 1
    tokens = M.to(gl.int64)
    ranks = (C + BLOCK_C - 1) // BLOCK_C
    tiles = (M + BLOCK_M - 1) // BLOCK_M
    gates_each: gl.constexpr = SLOTS * BLOCK_M * N
    counts = flags + teams * gates_each
    orders = counts + teams * SLOTS
    states = orders + teams * RING
    tickets = states + teams
    drawn = tickets + 1
    program = gl.program_id(0)
    if DRAWN:
        program = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu").to(gl.int32)
    team = program // ranks
    rank = program % ranks
    order = orders + team * RING
    rounds = gl.maximum(ranks // BLOCK_M, 1)
    # Tiles drawn ahead: enough that every turn asked for is drawn, and nobody waits. Few tiles are shared evenly.
    draws = gl.maximum(gl.minimum(LAG + AHEAD + 2, tiles // teams), gl.maximum(AHEAD + 1, rounds))
    if DRAWN and rank == ranks - 1:
        _begin(states + team, drawn, order, draws, tiles)
    x_s = ()
    for _ in gl.static_range(N):
        x_s = x_s + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_C], WIDE),)
    f_s = x_s[0]
    if f is not None:
        f_s = gl.allocate_shared_memory(gl.bfloat16, [AHEAD + 1, BLOCK_M, BLOCK_C], WIDE)
    phi_s = room_for_phi(N, K, PARTS, BLOCK_C, WIDE)
    # More than the tiles, LAG + 1, that `_stream` can be ahead of `_announce`.
    stored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(stored.index(stage), count=1)
    first_tiles = ()
    if not DRAWN:
        for turn in gl.static_range(AHEAD + 1):
            first_tiles = first_tiles + (team + turn * teams,)
        for turn in gl.static_range(AHEAD):
            _fetch(x_s, f_s, turn, x, f, first_tiles[turn].to(gl.int64) * BLOCK_M, rank * BLOCK_C, tokens, C, N, STAGES,
                   AHEAD + 1, BLOCK_M, BLOCK_C, TILE)  # fmt: skip
    for piece in gl.static_range(pieces(K)):
        split_phi(phi_s[piece], rows_before(piece, K), phi, norm_weight, phi_k, phi_c, rank * BLOCK_C, C, N, K, PARTS,
                  rows_of(piece, K), HAS_NORM, BLOCK_C, TILE)  # fmt: skip
    if DRAWN:
        is_full = decided(states + team, drawn, tiles, PATIENCE, PATIENCE_BESIDE) == 1
        for turn in gl.static_range(AHEAD + 1):
            of_turn = tiles
            if is_full:
                of_turn = number_when_tagged(order + turn, gl.to_tensor(turn + 1))
            first_tiles = first_tiles + (of_turn,)
        for turn in gl.static_range(AHEAD):
            _fetch(x_s, f_s, turn, x, f, first_tiles[turn].to(gl.int64) * BLOCK_M, rank * BLOCK_C, tokens, C, N, STAGES,
                   AHEAD + 1, BLOCK_M, BLOCK_C, TILE)  # fmt: skip
    gates = flags + team * gates_each
    counts += team * SLOTS
    parts += team.to(gl.int64) * (SLOTS * ranks * BLOCK_M * ROWS)
    gl.warp_specialize(
        [
            (_stream, (f, h_post, x, h_res, out, layer_input, parts, gates, order, stored, x_s, f_s, phi_s, first_tiles,
                       team, teams, rank, ranks, tiles, tokens, C, N, K, PARTS, ROWS, DRAWN, BLOCK_M, BLOCK_C, LAG,
                       AHEAD, WARPS)),
            (_announce, (stored, counts, order, drawn, first_tiles[0], draws, team, teams, rank, ranks, tiles, DRAWN,
                         STAGES, SLOTS)),
            (_add_up, (parts, gates, counts, order, scale, bias, h, ms, next_post, next_res, first_tiles[0], team,
                       teams, rank, ranks, tiles, tokens, inverse_columns, rms_eps, pre_eps, post_mult, post_eps,
                       sinkhorn_eps, start_eps, pairs, N, K, GATES, ROWS, RMS_MODE, START, FIRST, CLAMP, ODD, GROUPED,
                       GROUPS, CHUNKS, CHUNK, OWN, DRAWN, BLOCK_M, SLOTS)),
        ],
        [1, 1],
        [REGISTERS_TO_ADD, REGISTERS_TO_ADD],
    )  # fmt: skip


def _teams(x: torch.Tensor) -> int:
    """How many teams run at once on x's device."""
    return PROGRAMS_EACH * gpus.processors(x.device) // cdiv(x.shape[-1], COLUMNS)


def fits(x: torch.Tensor, phi: torch.Tensor) -> bool:
    """Whether the kernel is for x [..., n, C] and its device, however many tokens; dtype and strides are not asked."""
    if phi.shape[0] > MOST_ROWS:
        return False
    width = x.shape[-1]
    ranks, teams = cdiv(width, COLUMNS), _teams(x)
    # A fifth of the GPU idle is what the second pass costs; a single team has not been measured.
    filled = teams > 1 and 5 * teams * ranks >= 4 * PROGRAMS_EACH * gpus.processors(x.device)
    return filled and cdiv(TOKENS, ranks) <= MOST_OWN


def pays(x: torch.Tensor) -> bool:
    """Whether it takes less time than two passes over x.

    With few tokens that is the host's, which has one launch in place of two. Where tiles are drawn, it has two, and
    kernels beside it cost a team or two.
    """
    n, width = x.shape[-2:]
    tokens = expected(x.numel() // (n * width))
    own = cdiv(TOKENS, cdiv(width, COLUMNS))
    if communicates():
        fast = gpus.bytes_per_second(x.device) > FAST_MEMORY
        return tokens >= FEWEST and own == 1 and _teams(x) >= FEWEST_TEAMS and (n == 2 or not fast)
    if tokens < FEWEST:
        return launched_by_host(x.device)
    return own == 1 or tokens >= FEWEST_OF_NARROW


def forward(
    x: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    layer_input: torch.Tensor,
    gates_made: tuple[torch.Tensor, ...],
    combine: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    *,
    rms: Rms,
    gates: Gates,
    sinkhorn: Sinkhorn,
) -> None:
    """Fill layer_input [M, C], and with the next h_post [M, n], h_res [M, n, n], h [M, K] and ms [M] those four.

    There are as many gates as bias has entries: without rows for them, h_post and h_res have no elements.

    combine: f [M, C], h_post, h_res, and out for x' [M, n, C]; without it the gates are those of x itself.
    """
    tokens, n, width = x.shape
    rows, form = phi.shape[0], sinkhorn.iterated
    ranks, teams = cdiv(width, COLUMNS), _teams(x)
    chunks, chunk = combine_project.cut(width)
    f, post, res, out = combine or (None, None, None, None)
    lag, ahead = (LAGS if combine else LAGS_ALONE)[n]
    slots = teams * (lag + 1)
    # What the last program has told, and the others have not read yet.
    assert max(lag + ahead + 2, ranks // TOKENS) + lag + 1 < RING.value
    # Columns for h, the squares, and the gates of the read, which `boundary_rest` puts there.
    row = next_power_of_2(rows + 1 + n)
    parts = torch.empty(slots * TOKENS * ranks * row, dtype=torch.float32, device=x.device)
    flags = torch.zeros(slots * (TOKENS * n + 1) + teams * (RING.value + 1) + 2, dtype=torch.int64, device=x.device)
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    drawn = communicates()
    # What both kernels take; the second has a program for each room for parts.
    both = (
        f, None if post is None else post.float(), x, None if res is None else res.float(), phi, norm_weight,
        scale.contiguous(), bias.contiguous(), out, layer_input, *gates_made, parts, flags, tokens, width,
        phi.stride(0), phi.stride(1),
    )  # fmt: skip
    numbers = (
        1.0 / (n * width), rms.eps, gates.pre_eps, gates.post_mult, gates.post_eps, form.eps, form.start_eps,
        form.steps // 2,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "N": n, "K": rows, "GATES": bias.shape[0], "PARTS": max(2, parts_of(x, phi, norm_weight)), "ROWS": row,
        "HAS_NORM": norm_weight is not None, "RMS_MODE": rms.mode, "START": form.start, "FIRST": form.first,
        "CLAMP": form.clamp, "ODD": form.steps % 2 == 1, "GROUPED": group_scale(scale, bias), "GROUPS": GROUPS,
        "CHUNKS": chunks, "CHUNK": chunk, "BLOCK_M": TOKENS, "BLOCK_C": COLUMNS, "WARPS": WARPS, "num_warps": WARPS,
    }  # fmt: skip
    with on_device(x):
        launch(
            boundary_pass_kernel, (teams * ranks,), *both, teams, *numbers, **constants, OWN=cdiv(TOKENS, ranks),
            DRAWN=drawn, LAG=lag, AHEAD=ahead, REGISTERS_TO_ADD=REGISTERS_TO_ADD, maxnreg=REGISTERS,
            launch_cooperative_grid=not drawn,
        )  # fmt: skip
        if drawn:
            launch(boundary_rest_kernel, (slots,), *both, flags.numel() - 1, *numbers, **constants)
