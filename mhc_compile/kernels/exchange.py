"""How programs of one launch hand numbers to each other through memory, in Gluon.

A float32 goes with the tag of its turn in 8 bytes, which are stored and loaded whole: who waits for it asks until the
tag is there, and needs no fence. Where many numbers come from many programs, these are counted in after a fence.
"""

# mypy: disable-error-code="assignment"
# (A tuple that a kernel builds up one by one changes its type each time.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _types(dtype: gl.dtype, n: int) -> tuple[gl.dtype, ...]:
    return (dtype,) * n


@gluon.constexpr_function
def _operands(kind: str, written: int, longs: int, words: int = 0) -> str:
    """Those of an inline assembly: what it writes, all of a kind, and how many of 64 and of 32 bits it reads."""
    return ",".join([kind] * written + ["l"] * longs + ["r"] * words)


@gluon.constexpr_function
def _load(n: int) -> str:
    return "\n".join(f"ld.relaxed.gpu.global.b64 ${i}, [${n + i}];" for i in range(n))


@gluon.constexpr_function
def _load_until_tagged(n: int) -> str:
    """From $0 on n numbers, of those with tags after them, which are loaded again from what comes next until all have
    the tag that comes last."""
    return "\n".join(
        [
            "{",
            ".reg .pred %all;",
            ".reg .b32 %tag, %wrong;",
            *(f".reg .b64 %both{i};" for i in range(n)),
            *(f"mov.b64 %both{i}, ${n + i};" for i in range(n)),
            "again:",
            "mov.b32 %wrong, 0;",
            *(
                line
                for i in range(n)
                for line in (
                    f"mov.b64 {{${i}, %tag}}, %both{i};",
                    f"xor.b32 %tag, %tag, ${3 * n};",
                    "or.b32 %wrong, %wrong, %tag;",
                )
            ),
            "setp.eq.u32 %all, %wrong, 0;",
            "@%all bra done;",
            *(f"ld.relaxed.gpu.global.b64 %both{i}, [${2 * n + i}];" for i in range(n)),
            "bra again;",
            "done:",
            "}",
        ]
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


# $0: the number that has the tag $2 after it at $1, once it has.
_UNTIL_TAGGED = gl.constexpr(
    """{
.reg .pred %there;
.reg .b64 %both;
.reg .b32 %tag;
again:
ld.relaxed.gpu.global.b64 %both, [$1];
mov.b64 {$0, %tag}, %both;
setp.eq.u32 %there, %tag, $2;
@%there bra done;
nanosleep.u32 20;
bra again;
done:
}"""
)

# The same, where what was at the pointer $2 some time ago is $1, and the tag is $3.
_TAGGED_BY_NOW = gl.constexpr(_load_until_tagged(1))
_NOW = gl.constexpr(_load(1))

# $0: what is at $1, once it is not 0. Replaces 0 by 2 after $4 nanoseconds, after $5 if the number at $2 is not 0, and
# at once if that is $3 or more.
_UNTIL_DECIDED = gl.constexpr(
    """{
.reg .pred %there, %some, %all, %late, %leave;
.reg .b64 %count, %start, %now, %patience, %before;
mov.u64 %start, %globaltimer;
again:
ld.acquire.gpu.global.b64 $0, [$1];
setp.ne.s64 %there, $0, 0;
@%there bra done;
ld.relaxed.gpu.global.b64 %count, [$2];
setp.gt.s64 %some, %count, 0;
setp.ge.s64 %all, %count, $3;
selp.b64 %patience, $5, $4, %some;
mov.u64 %now, %globaltimer;
sub.u64 %now, %now, %start;
setp.gt.u64 %late, %now, %patience;
or.pred %leave, %late, %all;
@!%leave bra sleep;
atom.relaxed.gpu.global.cas.b64 %before, [$1], 0, 2;
sleep:
nanosleep.u32 100;
bra again;
done:
}"""
)


@gluon.constexpr_function
def _load_floats(n: int) -> str:
    return f"ld.global.nc.v{n}.f32 {{{', '.join(f'${i}' for i in range(n))}}}, [${n}];"


@gluon.jit
def load_floats(at, N: gl.constexpr):
    """N numbers side by side, for each pointer, in one instruction; nobody writes them meanwhile."""
    LOAD: gl.constexpr = _load_floats(N)
    KINDS: gl.constexpr = _operands("=f", N, 1)
    FLOATS: gl.constexpr = _types(gl.float32, N)
    return gl.inline_asm_elementwise(LOAD, KINDS, [at.to(gl.int64)], FLOATS, is_pure=True, pack=1)


@gluon.jit
def hand_out(at, value, tag, mask):
    """Store a number with its tag.

    An exchange, because a store that others may see half done would not do. It needs no fence: the number is made of
    all that this warp has read, so that it cannot come before the reads.
    """
    both = (value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF) | (tag.to(gl.int64) << 32)
    gl.atomic_xchg(at, both, mask=mask, sem="relaxed", scope="gpu")


@gluon.jit
def ask(at, N: gl.constexpr):
    """What is at each pointer, and at the N - 1 > 0 after it, now: numbers with tags, for `answer`."""
    pointers = ()
    for i in gl.static_range(N):
        pointers = pointers + ((at + i).to(gl.int64),)
    LOAD: gl.constexpr = _load(N)
    KINDS: gl.constexpr = _operands("=&l", N, N)
    LONGS: gl.constexpr = _types(gl.int64, N)
    return gl.inline_asm_elementwise(LOAD, KINDS, pointers, LONGS, is_pure=False, pack=1), pointers


@gluon.jit
def answer(asked, tag, N: gl.constexpr):
    """The N numbers that were asked for, when all have the tag."""
    then, pointers = asked
    WAIT: gl.constexpr = _load_until_tagged(N)
    KINDS: gl.constexpr = _operands("=&r", N, 2 * N, 1)
    FLOATS: gl.constexpr = _types(gl.float32, N)
    return gl.inline_asm_elementwise(WAIT, KINDS, then + pointers + (tag,), FLOATS, is_pure=False, pack=1)


@gluon.jit
def count_in(count):
    """Let others know that what this program has stored, as far as this thread knows of it, is there."""
    gl.atomic_add(count, 1, sem="release", scope="gpu")


@gluon.jit
def wait_for(count, expected, like):
    """Wait until so many have been counted in, in all threads of a tensor's layout."""
    at = gl.zeros_like(like).to(gl.int64) + count.to(gl.int64)
    most = gl.zeros_like(like).to(gl.int64) + expected
    gl.inline_asm_elementwise(_UNTIL_COUNTED, "=&l,l,l", [at, most], gl.int64, is_pure=False, pack=1)


@gluon.jit
def number_when_tagged(at, tag):
    """The number at a pointer, when it has the tag."""
    return gl.inline_asm_elementwise(_UNTIL_TAGGED, "=&r,l,r", [at.to(gl.int64), tag], gl.int32, is_pure=False, pack=1)


@gluon.jit
def ask_for_one(at):
    """As `ask`, for a single number."""
    return gl.inline_asm_elementwise(_NOW, "=&l,l", [at.to(gl.int64)], gl.int64, is_pure=False, pack=1)


@gluon.jit
def answer_of_one(then, at, tag):
    """The whole number at a pointer, for which `ask_for_one` asked then, when it has the tag."""
    args = [then, at.to(gl.int64), tag]
    return gl.inline_asm_elementwise(_TAGGED_BY_NOW, "=&r,l,l,r", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def decided(state, count, all_of_it, patience, patience_beside):
    """What is at `state`, once it is not 0; who waits longer than `patience`, in nanoseconds, decides that it is 2.

    patience_beside: in place of patience, where count is more than 0. Nobody waits where it is all.
    """
    KINDS: gl.constexpr = "=&l,l,l,l,l,l"
    args = [state.to(gl.int64), count.to(gl.int64), all_of_it.to(gl.int64), patience, patience_beside]
    return gl.inline_asm_elementwise(_UNTIL_DECIDED, KINDS, args, gl.int64, is_pure=False, pack=1)
