# mypy: disable-error-code="no-untyped-def"
"""How ranks send to each other over peer memory, in Triton: the parts that every such kernel is made of.

Ranks push: a rank writes what it sends into the others' memory, where nothing is 0 that has arrived: a number that is
zero is sent with a minus sign. Whoever reads looks until no number is 0, then writes zeros back for the call after the
next. So an exchange takes one way through the links, with no flags, and a program waits for the same program of the
others alone.

A call uses the half of the memory that the call before did not. A rank sends in the call after the next when it has
ended the next, for which it got what this one sends there: this one had ended the call, and its half is empty.

Calls are counted on the device, so that a captured graph counts on.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Programs of a launch, and elements that one of them takes at a time where rows do not matter.
MAX_PROGRAMS, RUN_LENGTH = 264, 2048


@triton.jit
def begin_call(p_calls, PLACES: tl.constexpr, PDL: tl.constexpr):
    """The number of the call that begins, and the first place of its half of the memory."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    call = tl.load(p_calls) + 1
    return call, call % 2 * PLACES


@triton.jit
def count_call(p_calls, call):
    """The last program that has seen the number of calls raises it. While what others send is on its way."""
    if tl.atomic_add(p_calls + 1, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(p_calls + 1, 0)
        tl.store(p_calls, call)


@triton.jit
def as_bits(x):
    return x.to(tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)


@triton.jit
def slot_of(p_bases, at_rank, place, sender, slot, SIZE: tl.constexpr, kind: tl.constexpr):
    """Where what `sender` sends to `at_rank` is, as pointers to the bits of numbers of that kind."""
    base = tl.load(p_bases + at_rank) + (place * SIZE + (sender - at_rank + SIZE) % SIZE) * slot
    bits = tl.int16 if kind.primitive_bitwidth == 16 else tl.int32
    return tl.multiple_of(base.to(tl.pointer_type(bits)), 16)


@triton.jit
def push(p_sent, at, x, held):
    """Send x, which is not 0 in any bit pattern of it."""
    bits = as_bits(x)
    minus_zero = -32768 if x.dtype.primitive_bitwidth == 16 else -2147483648
    tl.store(p_sent + at, tl.where(bits == 0, minus_zero, bits).to(bits.dtype), mask=held)


@triton.jit
def push_all(p_bases, place, slot, at, x, held, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Send x to every other rank."""
    for to in tl.static_range(SIZE):
        if to != RANK:
            push(slot_of(p_bases, to, place, RANK, slot, SIZE, x.dtype), at, x, held)


@triton.jit
def arrived(p_sent, at, held, kind: tl.constexpr):
    """What was sent, once all of it is there; its place is empty then."""
    bits = tl.load(p_sent + at, mask=held, other=1, volatile=True)
    while tl.max((bits == 0).to(tl.int32), axis=0) > 0:
        bits = tl.load(p_sent + at, mask=held, other=1, volatile=True)
    tl.store(p_sent + at, tl.zeros_like(bits), mask=held)
    return bits.to(kind, bitcast=True)


@triton.jit
def plain_zeros(x):
    """x, whose zeros have no sign."""
    return tl.where(x == 0.0, tl.zeros_like(x), x)
