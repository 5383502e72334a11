"""Why writes to some of the streams are left: no operator makes them."""

from __future__ import annotations

from mhc_compile.passes.recognise.part_writes import PartWrite


def why_left(write: PartWrite) -> str:
    """The reason, in words that begin with "this"."""
    n = write.read.streams.n
    if write.to_all:
        return (
            f"this adds the sublayer's output to the {n} streams one after the other; the operator writes all at "
            "once: add h_post.unsqueeze(-1) * f.unsqueeze(-2) to the streams"
        )
    return to_some(n)


def to_some(n: int) -> str:
    """The reason for a write to fewer than n streams."""
    return (
        f"this adds the sublayer's output f to some of the {n} streams; the operator adds h_post[i] f to each "
        "stream i: multiply f by an h_post that is 0 for the other streams"
    )
