"""A boundary in one pass, in Gluon for Hopper: new streams stay in shared memory until their gates are known.

    x'[o] = h_post[o] f + sum_i h_res[i, o] x[i]     h = x' phi^T     layer_input = sum_o h_pre[o](h) x'[o]

h_pre needs all columns of a token, which are too many for one processor. So a team of programs works on the same tile
of tokens, each on 64 columns: it combines them, stores its part of h, keeps x' in shared memory and goes on to the
next tile. LAG tiles later the gates are there, and it weighs x'. In C-units of n = 4 that is 10, where
`combine_project` and the aggregate move 14.

Who does what, in a program:
- `_stream`: combines, projects, and aggregates; waits for a tile's gates, each a number and the tile's tag in 8 bytes.
- `_announce`: counts the program in when its part of h can be read by others.
- `_add_up`: when all are counted, adds up the parts of a token (tokens are dealt out among the team), in the order of
  `projection.partial_sum` and so to its last bit, and hands out the gates.

Programs wait for each other, so all must run at once: the launch is cooperative, which a GPU begins when there is room
for all, and not before. Nobody overwrites what may still be read. A program stores its part of tile t + LAG + 1 in the
place of tile t's after it had the gates of tile t, which are sums of all parts of it; the gates of t + LAG + 1 take the
place of those of t after all programs have stored their parts of it, each when all its threads had the gates of t.
"""

# mypy: disable-error-code="assignment,var-annotated"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mhc_compile.forms import Gates, Rms
from mhc_compile.kernels import combine_project, communicates
from mhc_compile.kernels.common import cdiv, group_scale, launch, on_device, processors
from mhc_compile.kernels.gates import affine, rms_factor
from mhc_compile.kernels.one_pass import ROWS, barrier, combined, copy_rows, split_phi
from mhc_compile.kernels.opaque import opaque
from mhc_compile.kernels.projection import GROUPS, Partials, parts_of

# For n = 4; two programs share a processor, its registers and its shared memory.
STREAMS = 4
TOKENS, WARPS = 32, 4
# As there, since the order of sums is that of its blocks.
COLUMNS = combine_project.MANY.columns
# Registers of a thread: 104 for those that add up, for which the others have 152 of their 128.
PROGRAMS_EACH, REGISTERS, REGISTERS_TO_ADD = 2, 128, 104
# Tiles between a tile's combine and its aggregate, while its parts of h come and go. With 1 it takes an eighth more.
LAG = 2
# With few tokens, what a program does once takes more time than a second pass.
FEWEST_TOKENS = 4096

_FOUR_FLOATS = gl.constexpr((gl.float32,) * 4)
_FOUR_LONGS = gl.constexpr((gl.int64,) * 4)
_LOAD_FLOATS = gl.constexpr("ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];")
_LOAD_LONGS = gl.constexpr("\n".join(f"ld.relaxed.gpu.global.b64 ${i}, [${4 + i}];" for i in range(4)))
# $0 to $3: the numbers of $4 to $7, which are loaded again from $8 to $11 until all have the tag $12.
_UNTIL_TAGGED = gl.constexpr(
    "\n".join(
        [
            "{",
            ".reg .pred %all;",
            ".reg .b32 %tag, %wrong;",
            *(f".reg .b64 %both{i};" for i in range(4)),
            *(f"mov.b64 %both{i}, ${4 + i};" for i in range(4)),
            "again:",
            "mov.b32 %wrong, 0;",
            *(
                line
                for i in range(4)
                for line in (
                    f"mov.b64 {{${i}, %tag}}, %both{i};",
                    "xor.b32 %tag, %tag, $12;",
                    "or.b32 %wrong, %wrong, %tag;",
                )
            ),
            "setp.eq.u32 %all, %wrong, 0;",
            "@%all bra done;",
            *(f"ld.relaxed.gpu.global.b64 %both{i}, [${8 + i}];" for i in range(4)),
            "bra again;",
            "done:",
            "}",
        ]
    )
)
# $0: what is at $1, once it is not less than $2.
_UNTIL_COUNTED = gl.constexpr(
    """{
.reg .pred %all;
again:
ld.acquire.gpu.global.b64 $0, [$1];
setp.ge.s64 %all, $0, $2;
@%all bra done;
nanosleep.u32 20;
bra again;
done:
}"""
)


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
def _coefficients(h_post, h_res, tok, tokens):
    """The 4 + 16 of each token; for tokens that are not there those of the last."""
    tok = gl.minimum(tok, tokens - 1)
    at = [(h_post + tok * 4).to(gl.int64)]
    post = gl.inline_asm_elementwise(_LOAD_FLOATS, "=f,=f,=f,=f,l", at, _FOUR_FLOATS, is_pure=True, pack=1)
    res = ()
    for i in gl.static_range(4):
        at = [(h_res + tok * 16 + 4 * i).to(gl.int64)]
        res = res + gl.inline_asm_elementwise(_LOAD_FLOATS, "=f,=f,=f,=f,l", at, _FOUR_FLOATS, is_pure=True, pack=1)
    return post, res


@gluon.jit
def _tagged(value, tag):
    """A float32 and the tag of its tile as one number, which is stored and loaded whole."""
    return (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | (tag.to(gl.int64) << 32)


@gluon.jit
def _dot(left, phi_s, o, small, large, PARTS: gl.constexpr, ROWS: gl.constexpr, RIGHT: gl.constexpr):
    """Add the products of a stream to those with the small parts of phi, and with the large one."""
    for part in gl.static_range(PARTS - 1, -1, -1):
        right = phi_s[part].slice(o * ROWS, ROWS, 0).permute((1, 0)).load(RIGHT)
        if part > 0:
            small = mma_v2(left, right, small)
        else:
            large = mma_v2(left, right, large)
    return small, large


@gluon.jit
def _stream(f, h_post, x, h_res, out, layer_input, parts, gates, stored, x_s, f_s, first_phi, last_phi, team, teams,
            rank, ranks, mine, tokens, C, N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr,
            BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr, LAG: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Combine, project, and LAG tiles later aggregate the columns of this program, tile by tile."""
    LANES: gl.constexpr = BLOCK_C // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    TOKEN: gl.constexpr = gl.SliceLayout(1, TILE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [BLOCK_M // 16, WARPS // (BLOCK_M // 16)], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # A tile on its way, one at work, and those that wait for their gates.
    STAGES: gl.constexpr = LAG + 2
    SLOTS: gl.constexpr = LAG + 1
    SLOT: gl.constexpr = BLOCK_M * ROWS
    start = rank * BLOCK_C
    row = gl.arange(0, BLOCK_M, TOKEN)
    row_h = gl.arange(0, BLOCK_M, gl.SliceLayout(1, MMA))[:, None]
    c = (start + gl.arange(0, BLOCK_C, gl.SliceLayout(0, TILE)))[None, :]
    inside = c < C
    post, res = _coefficients(h_post, h_res, row + team.to(gl.int64) * BLOCK_M, tokens)
    for turn in range(mine + LAG):
        stage = turn % STAGES
        # Asked for now, since the answer takes a while.
        at = (gates + ((turn + 1) % SLOTS * BLOCK_M + row) * N).to(gl.int64)
        at_gates = (at, at + 8, at + 16, at + 24)
        gates_then = gl.inline_asm_elementwise(_LOAD_LONGS, "=&l,=&l,=&l,=&l,l,l,l,l", at_gates, _FOUR_LONGS,
                                               is_pure=False, pack=1)  # fmt: skip
        if turn < mine:
            first = (team + turn * teams).to(gl.int64) * BLOCK_M
            tok = row + first
            _fetch(x_s, f_s, turn + 1, x, f, first + teams * BLOCK_M, start, tokens, C, N, STAGES, 2, BLOCK_M, BLOCK_C,
                   TILE)  # fmt: skip
            async_copy.wait_group(1)
            barrier()
            mask = (tok < tokens)[:, None] & inside
            out_at = out + tok[:, None] * (N * C) + c
            f_row = f_s.index(turn % 2).load(TILE).to(gl.float32)
            old = ()
            for i in gl.static_range(N):
                old = old + (x_s[i].index(stage).load(TILE),)
            terms = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE)
            for o in gl.static_range(N):
                new = combined(post, res, f_row, old, o, N).to(gl.bfloat16)
                # A thread reads of x what it copied, and overwrites it.
                x_s[o].index(stage).store(new)
                v = new.to(gl.float32)
                terms = gl.fma(v, v, terms)
            at_part = parts + (turn % SLOTS * ranks + rank) * SLOT
            gl.store(at_part + row * ROWS + K, gl.sum(terms, axis=1))
            post, res = _coefficients(h_post, h_res, tok + teams * BLOCK_M, tokens)
            barrier()
            small = gl.zeros([BLOCK_M, 16], gl.float32, MMA)
            large = gl.zeros([BLOCK_M, 16], gl.float32, MMA)
            small_last = gl.zeros([BLOCK_M, 8], gl.float32, MMA)
            large_last = gl.zeros([BLOCK_M, 8], gl.float32, MMA)
            for o in gl.static_range(N):
                left = x_s[o].index(stage).load(LEFT)
                small, large = _dot(left, first_phi, o, small, large, PARTS, 16, RIGHT)
                small_last, large_last = _dot(left, last_phi, o, small_last, large_last, PARTS, 8, RIGHT)
            k = gl.arange(0, 16, gl.SliceLayout(0, MMA))[None, :]
            gl.store(at_part + row_h * ROWS + k, large + small)
            k_last = 16 + gl.arange(0, 8, gl.SliceLayout(0, MMA))[None, :]
            gl.store(at_part + row_h * ROWS + k_last, large_last + small_last)
            barrier()
            mbarrier.arrive(stored.index(turn % STAGES), count=1)
            # Last, since others wait for the sums.
            for o in gl.static_range(N):
                gl.store(out_at + o * C, x_s[o].index(stage).load(TILE), mask=mask)
        if turn >= LAG:
            tok_then = row + (team + (turn - LAG) * teams).to(gl.int64) * BLOCK_M
            tag = gl.zeros_like(row) + (turn - LAG + 1)
            h_pre = gl.inline_asm_elementwise(_UNTIL_TAGGED, "=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l,r",
                                              gates_then + at_gates + (tag,), _FOUR_FLOATS, is_pure=False,
                                              pack=1)  # fmt: skip
            acc = gl.zeros([BLOCK_M, BLOCK_C], gl.float32, TILE)
            for o in gl.static_range(N):
                acc += h_pre[o][:, None] * x_s[o].index((turn - LAG) % STAGES).load(TILE).to(gl.float32)
            gl.store(layer_input + tok_then[:, None] * C + c, acc.to(layer_input.dtype.element_ty),
                     mask=(tok_then < tokens)[:, None] & inside)  # fmt: skip
    async_copy.wait_group(0)


@gluon.jit
def _announce(stored, counts, team, teams, mine, STAGES: gl.constexpr):
    """Count this program in for each of its tiles, when all of its part has been stored."""
    for turn in range(mine):
        mbarrier.wait(stored.index(turn % STAGES), turn // STAGES & 1)
        gl.atomic_add(counts + (team + turn * teams), 1, sem="release", scope="gpu")


@gluon.jit
def _add_up(parts, gates, counts, scale, bias, h, squares, team, teams, rank, ranks, mine, tokens, inverse_columns,
            rms_eps, pre_eps, N: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, RMS_MODE: gl.constexpr,
            GROUPED: gl.constexpr, GROUPS: gl.constexpr, CHUNKS: gl.constexpr, CHUNK: gl.constexpr,
            OWN: gl.constexpr, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """h and squares of the tokens that are this program's, and the gates of them for the team."""
    SUMS: gl.constexpr = gl.BlockedLayout([1, 4], [GROUPS, 32 // GROUPS], [1, 1], [1, 0])
    WHOLE: gl.constexpr = gl.BlockedLayout([GROUPS, 1], [1, 32], [1, 1], [1, 0])
    SLOT: gl.constexpr = BLOCK_M * ROWS
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, SUMS))[:, None]
    column = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    k = gl.arange(0, ROWS, gl.SliceLayout(0, WHOLE))
    gate_scale, gate_bias = affine(scale, bias, k, k < N, 0, GROUPED)
    # Where there are more programs than tokens in a tile, they take turns.
    rounds = gl.maximum(ranks // BLOCK_M, 1)
    for turn in range(mine):
        tile = team + turn * teams
        mine_first = (rank - turn % rounds) // rounds
        if ((rank - turn % rounds) % rounds == 0) & (mine_first < BLOCK_M):
            at_count = gl.zeros_like(k).to(gl.int64) + (counts + tile).to(gl.int64)
            gl.inline_asm_elementwise(_UNTIL_COUNTED, "=&l,l,l", [at_count, gl.zeros_like(k).to(gl.int64) + ranks],
                                      gl.int64, is_pure=False, pack=1)  # fmt: skip
            for own in gl.static_range(OWN):
                t = mine_first + own * ranks
                if t < BLOCK_M:
                    blocks = ()
                    for block in gl.static_range(CHUNKS * CHUNK):
                        of = block * GROUPS + group
                        at = parts + (turn % SLOTS * ranks + of) * SLOT + t * ROWS + column
                        blocks = blocks + (gl.load(at, mask=of < ranks, other=0.0, cache_modifier=".cg"),)
                    of_groups = gl.zeros([GROUPS, ROWS], gl.float32, SUMS)
                    for chunk in gl.static_range(CHUNKS):
                        of_chunk = blocks[chunk * CHUNK]
                        for block in gl.static_range(1, CHUNK):
                            of_chunk += blocks[chunk * CHUNK + block]
                        of_groups += of_chunk
                    total = gl.sum(gl.convert_layout(of_groups, WHOLE), axis=0)
                    mean = gl.sum(gl.where(k == K, total, 0.0), axis=0) * inverse_columns
                    r = rms_factor(mean, rms_eps, RMS_MODE)
                    # As in `mix`, to the bit.
                    gate = 1.0 / (1.0 + gl.exp(-(r * total * gate_scale + gate_bias))) + pre_eps
                    at_gates = gates + (turn % SLOTS * BLOCK_M + t) * N + k
                    # An exchange, because a store that others may see half done would not do. It needs no fence: what
                    # it hands out is made of all that this warp has read, so that it cannot come before the reads.
                    gl.atomic_xchg(at_gates, _tagged(gate, gl.zeros_like(k) + (turn + 1)), mask=k < N, sem="relaxed",
                                   scope="gpu")  # fmt: skip
                    tok = tile.to(gl.int64) * BLOCK_M + t
                    gl.store(h + k.to(gl.int64) * tokens + tok, total, mask=(k < K) & (tok < tokens))
                    gl.store(squares + tok + k * 0, total, mask=(k == K) & (tok < tokens))


@opaque("out", "layer_input", "h", "squares", "parts", "flags")
@gluon.jit(do_not_specialize=["M"])
def boundary_pass_kernel(f, h_post, x, h_res, phi, norm_weight, scale, bias, out, layer_input, h, squares, parts,
                         flags, M, C, phi_k, phi_c, teams, inverse_columns, rms_eps, pre_eps, N: gl.constexpr,
                         K: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, HAS_NORM: gl.constexpr,
                         RMS_MODE: gl.constexpr, GROUPED: gl.constexpr, GROUPS: gl.constexpr, CHUNKS: gl.constexpr,
                         CHUNK: gl.constexpr, OWN: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_C: gl.constexpr,
                         LAG: gl.constexpr, WARPS: gl.constexpr, REGISTERS_TO_ADD: gl.constexpr):  # fmt: skip
    """out [M, n, C], layer_input [M, C], h [1, K, M] and squares [1, M].

    parts [teams, LAG + 1, ranks, BLOCK_M, ROWS]: of h, in column K of the squares, and then nothing. flags, zero at
    first: gates [teams, LAG + 1, BLOCK_M, n], and for each tile how many programs have stored their part.
    """
    LANES: gl.constexpr = BLOCK_C // 8
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    STAGES: gl.constexpr = LAG + 2
    SLOTS: gl.constexpr = LAG + 1
    # K is 24: sixteen rows of phi and eight, since tiles are powers of two.
    gl.static_assert(K == 24)
    tokens = M.to(gl.int64)
    ranks = (C + BLOCK_C - 1) // BLOCK_C
    team = gl.program_id(0) // ranks
    rank = gl.program_id(0) % ranks
    mine = ((M + BLOCK_M - 1) // BLOCK_M - team + teams - 1) // teams
    x_s = ()
    for _ in gl.static_range(N):
        x_s = x_s + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_C], WIDE),)
    f_s = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, BLOCK_C], WIDE)
    first_phi = ()
    last_phi = ()
    for _ in gl.static_range(PARTS):
        first_phi = first_phi + (gl.allocate_shared_memory(gl.bfloat16, [N * 16, BLOCK_C], WIDE),)
        last_phi = last_phi + (gl.allocate_shared_memory(gl.bfloat16, [N * 8, BLOCK_C], WIDE),)
    # More than the tiles, LAG + 1, that `_stream` can be ahead of `_announce`.
    stored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(stored.index(stage), count=1)
    _fetch(x_s, f_s, 0, x, f, team.to(gl.int64) * BLOCK_M, rank * BLOCK_C, tokens, C, N, STAGES, 2, BLOCK_M, BLOCK_C,
           TILE)  # fmt: skip
    split_phi(first_phi, 0, phi, norm_weight, phi_k, phi_c, rank * BLOCK_C, C, N, K, PARTS, 16, HAS_NORM, BLOCK_C, TILE)
    split_phi(last_phi, 16, phi, norm_weight, phi_k, phi_c, rank * BLOCK_C, C, N, K, PARTS, 8, HAS_NORM, BLOCK_C, TILE)
    gates = flags + team * (SLOTS * BLOCK_M * N)
    counts = flags + teams * (SLOTS * BLOCK_M * N)
    parts += team.to(gl.int64) * (SLOTS * ranks * BLOCK_M * ROWS)
    gl.warp_specialize(
        [
            (_stream, (f, h_post, x, h_res, out, layer_input, parts, gates, stored, x_s, f_s, first_phi, last_phi, team,
                       teams, rank, ranks, mine, tokens, C, N, K, PARTS, ROWS, BLOCK_M, BLOCK_C, LAG, WARPS)),
            (_announce, (stored, counts, team, teams, mine, STAGES)),
            (_add_up, (parts, gates, counts, scale, bias, h, squares, team, teams, rank, ranks, mine, tokens,
                       inverse_columns, rms_eps, pre_eps, N, K, ROWS, RMS_MODE, GROUPED, GROUPS, CHUNKS, CHUNK, OWN,
                       BLOCK_M, SLOTS)),
        ],
        [1, 1],
        [REGISTERS_TO_ADD, REGISTERS_TO_ADD],
    )  # fmt: skip


def _teams(x: torch.Tensor) -> int:
    """How many teams run at once on x's device."""
    return PROGRAMS_EACH * processors(x.device) // cdiv(x.shape[-1], COLUMNS)


def fits(
    f: torch.Tensor, layer_bias: torch.Tensor | None, x: torch.Tensor, h_res: torch.Tensor | None, phi: torch.Tensor
) -> bool:
    """Whether the kernel is for f [..., C] and x [..., 4, C] (x' of x's dtype), and faster than two on their device.

    Not with torch.distributed: all of the GPU has to be free for it to begin, and so it would wait for communication
    that other kernels run beside.
    """
    n, width = x.shape[-2:]
    tokens = f.numel() // max(1, width)
    if n != STREAMS or phi.shape[0] != n * (n + 2) or not isinstance(tokens, int) or tokens < FEWEST_TOKENS:
        return False
    if communicates() or not combine_project.fits(f, layer_bias, x, h_res, phi):
        return False
    # A fifth of the GPU idle is what the second pass costs; a single team has not been measured.
    return _teams(x) > 1 and 5 * _teams(x) * cdiv(width, COLUMNS) >= 4 * PROGRAMS_EACH * processors(x.device)


def forward(
    f: torch.Tensor,
    h_post: torch.Tensor,
    x: torch.Tensor,
    h_res: torch.Tensor,
    phi: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor | None,
    out: torch.Tensor,
    layer_input: torch.Tensor,
    *,
    rms: Rms,
    gates: Gates,
) -> Partials:
    """Fill out with x' [M, n, C] and layer_input [M, C]; the sums are those of the projection of x'."""
    tokens, n, width = x.shape
    rows = phi.shape[0]
    ranks, tiles, teams = cdiv(width, COLUMNS), cdiv(tokens, TOKENS), _teams(x)
    chunks, chunk = combine_project.cut(width)
    slots = teams * (LAG + 1) * TOKENS
    h = torch.empty(1, rows, tokens, dtype=torch.float32, device=x.device)
    squares = torch.empty(1, tokens, dtype=torch.float32, device=x.device)
    parts = torch.empty(slots * ranks * ROWS, dtype=torch.float32, device=x.device)
    flags = torch.zeros(slots * n + tiles, dtype=torch.int64, device=x.device)
    norm_weight = None if norm_weight is None else norm_weight.contiguous()
    with on_device(x):
        launch(
            boundary_pass_kernel, (teams * ranks,),
            f, h_post.float(), x, h_res.float(), phi, norm_weight, scale.contiguous(), bias.contiguous(), out,
            layer_input, h, squares, parts, flags, tokens, width, phi.stride(0), phi.stride(1), teams,
            1.0 / (n * width), rms.eps, gates.pre_eps, N=n, K=rows, PARTS=max(2, parts_of(x, phi, norm_weight)),
            ROWS=ROWS, HAS_NORM=norm_weight is not None, RMS_MODE=rms.mode, GROUPED=group_scale(scale, rows),
            GROUPS=GROUPS, CHUNKS=chunks, CHUNK=chunk, OWN=cdiv(TOKENS, ranks), BLOCK_M=TOKENS, BLOCK_C=COLUMNS,
            LAG=LAG, WARPS=WARPS, REGISTERS_TO_ADD=REGISTERS_TO_ADD, num_warps=WARPS, maxnreg=REGISTERS,
            launch_cooperative_grid=True,
        )  # fmt: skip
    return Partials(h, squares, 1, 1)
