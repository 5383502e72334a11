"""Tile sizes, measured on one H100 at n = 4 and 8 (docs/notes), and the rule for what was not measured.

A tile's shape decides a result's last bits, so that it does not depend on the number of tokens. Where few tokens have a
tile of their own (`projection.project`, `combine_project`) it gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """tokens x columns of a program's tile, its warps and the depth of its load pipeline."""

    tokens: int
    columns: int
    warps: int
    stages: int = 3


TILES = {
    "project": Tile(128, 64, 8, 3),
    "project_half": Tile(64, 64, 4, 5),
    "project_few": Tile(16, 64, 4, 3),
    "aggregate": Tile(8, 512, 4),
    "pre_gradient": Tile(16, 256, 4),
    # Together with dx, 16 tokens would spill on sm_90.
    "aggregate_backward": Tile(8, 256, 4),
    "products": Tile(64, 64, 4, 1),
    "products_of_many_rows": Tile(64, 128, 4, 3),
    "combine": Tile(8, 256, 8),
    "combine_backward": Tile(32, 128, 8),
    # Not timed, as those below. Gradients of streams are float32 in registers. On sm_90, that of 8 streams spills.
    "combine_read": Tile(8, 256, 8),
    "combine_read_backward": Tile(16, 128, 8),
    # A thread has 16 bytes of a row, in the backward of many streams 8, and no kernel spills on sm_90.
    "mix_streams": Tile(8, 256, 8),
    "mix_streams_backward": Tile(16, 128, 8),
}
# Columns that one program of a gate gradient sums before a second stage adds the programs up.
SUM_COLUMNS = 512


def tile_for(name: str, n: int, itemsize: int) -> Tile:
    """The tile of a kernel for n streams of this item size."""
    tile = TILES[name]
    wide = itemsize == 4
    if name in ("combine", "combine_read", "combine_backward", "combine_read_backward"):
        if name == "combine" and n > 4 and not wide:
            tile = replace(tile, warps=4)
        return replace(tile, tokens=tile.tokens // 2) if wide or n > 4 else tile
    if name in ("mix_streams", "mix_streams_backward"):
        halved = wide or (n > 4 and name == "mix_streams_backward")
        return replace(tile, tokens=tile.tokens // 2) if halved else tile
    if name == "aggregate" and 4 < n <= 8 and not wide:
        return replace(tile, tokens=4)
    if name == "project_half" and n > 4:
        # More rows of phi in the same shared memory.
        return replace(tile, stages=3)
    if n > 8:
        # Streams are unrolled: what 4 can hold in registers, 16 would spill.
        if name == "pre_gradient":
            return replace(tile, tokens=8)
        if name == "aggregate":
            return replace(tile, columns=256)
        if name == "aggregate_backward":
            return replace(tile, warps=8)
    return tile


def tokens_of_values(padded: int) -> int:
    """Tokens per program of 4 warps that takes `padded` values, a power of 2, of each: at most 32 to a thread."""
    return max(4, min(128, 128 * 32 // padded))


def gate_tokens(n: int) -> int:
    """Tokens per program of the gate kernels (4 warps), for a token's n x n values."""
    padded = 1
    while padded < n:
        padded *= 2
    return tokens_of_values(padded * padded)
