"""Sums over ranks by memory that all of them can read and write, such as GPUs' over NVLink.

Every rank has one such block of bytes, and knows the addresses of all. Programs of one number meet:
each writes an epoch into a pad of every rank, and waits until all ranks have written theirs. Epochs
only grow, and a program keeps its own on the device, so nothing is reset, and a captured launch is
any other. Grids are the same for all sizes, so that all programs have met as often.

Sums are computed in float32 in the order of ranks: the same bits on all of them.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from attn_ops.early_launch.triton.launch import early_launch, quick, wait_for_inputs
from attn_ops.integers import next_power_of_2

PROGRAMS = 64
"""Of each launch. They wait for other ranks, so all must be on the GPU at once: one an SM fits."""

ONCE_BYTES = 512 << 10
"""Up to which every rank reads all of the others; above, it sums a part for all of them."""

PIECE_BYTES = 16 << 20
"""That are summed in one launch."""


@triton.jit
def _meet(bases, pads, epoch, rank, RANKS: tl.constexpr, LANES: tl.constexpr):
    """What this program has written, the others' programs of its number may read, and vice versa.

    `pads`: bytes from a rank's address to this launch's pads.
    """
    tl.debug_barrier()  # all threads have written
    lanes, program = tl.arange(0, LANES), tl.program_id(0)
    is_rank = lanes < RANKS
    theirs = tl.load(bases + lanes, mask=is_rank, other=0) + pads + (program * RANKS + rank) * 8
    epochs = tl.full((LANES,), epoch, tl.int64)
    where = theirs.to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(where, epochs, mask=is_rank, sem="release", scope="sys")
    own = tl.load(bases + rank) + pads + program * RANKS * 8
    mine = own.to(tl.pointer_type(tl.int64)) + lanes
    met = tl.full((), 0, tl.int64)
    while met < epoch:
        seen = tl.atomic_add(mine, tl.zeros_like(epochs), is_rank, "acquire", "sys")
        met = tl.min(tl.where(is_rank, seen, epochs))
    tl.debug_barrier()


@triton.jit
def _elements(bases, rank, place, like):
    """What lies in a rank's block from byte `place` on, as a pointer like another."""
    return tl.multiple_of((tl.load(bases + rank) + place).to(like.dtype), 16)


@triton.jit(do_not_specialize=["rank"])
def sum_once_kernel(
    x, out, bases, epochs, numel, rank,
    PADS: tl.constexpr, PLACE: tl.constexpr, HALF: tl.constexpr, RANKS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every rank lays its x where all can read it, and sums what all have laid there.

    There are two such places of HALF bytes, taken by turns: a rank that is one sum ahead does not
    overwrite what others still read.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    wait_for_inputs(PDL)
    epoch = tl.load(epochs + program) + 1
    place = PLACE + (epoch % 2) * HALF
    size = tl.cdiv(numel, programs * 16) * 16
    last = tl.minimum((program + 1) * size, numel)
    own = _elements(bases, rank, place, out)
    for first in range(program * size, last, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(own + i, tl.load(x + i, mask=i < last), mask=i < last)
    _meet(bases, PADS, epoch, rank, RANKS, LANES)
    for first in range(program * size, last, BLOCK):
        i = first + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(RANKS):
            rows = _elements(bases, r, place, out)
            total += tl.load(rows + i, mask=i < last, cache_modifier=".cg").to(tl.float32)
        tl.store(out + i, total.to(out.dtype.element_ty), mask=i < last)
    tl.store(epochs + program, epoch)


@triton.jit(do_not_specialize=["rank"])
def sum_parts_kernel(
    x, out, bases, epochs, numel, rank,
    PADS: tl.constexpr, INBOX: tl.constexpr, SUMS: tl.constexpr, RANKS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every rank gives each other one its part of x, sums its own part, and gives all the sum.

    A program has the same slice of each part.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    wait_for_inputs(PDL)
    epoch = tl.load(epochs + program) + 1
    size = tl.cdiv(numel, RANKS * programs * 16) * 16  # of a program's slice of a part
    part = size * programs
    for other in tl.static_range(1, RANKS):
        to = (rank + other) % RANKS
        inbox = _elements(bases, to, INBOX, out) + rank * part
        for first in range(program * size, (program + 1) * size, BLOCK):
            i = first + tl.arange(0, BLOCK)
            there = (i < (program + 1) * size) & (to * part + i < numel)
            tl.store(inbox + i, tl.load(x + to * part + i, mask=there), mask=there)
    _meet(bases, PADS, epoch, rank, RANKS, LANES)
    own = _elements(bases, rank, INBOX, out)
    for first in range(program * size, (program + 1) * size, BLOCK):
        i = first + tl.arange(0, BLOCK)
        there = (i < (program + 1) * size) & (rank * part + i < numel)
        mine = tl.load(x + rank * part + i, mask=there).to(tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(RANKS):
            given = tl.load(own + r * part + i, mask=there & (r != rank), cache_modifier=".cg")
            total += tl.where(r == rank, mine, given.to(tl.float32))
        rows = total.to(out.dtype.element_ty)
        tl.store(out + rank * part + i, rows, mask=there)
        for other in tl.static_range(1, RANKS):
            to = (rank + other) % RANKS
            sums = _elements(bases, to, SUMS, out)
            tl.store(sums + rank * part + i, rows, mask=there)
    _meet(bases, PADS, epoch + 1, rank, RANKS, LANES)
    sums = _elements(bases, rank, SUMS, out)
    for other in tl.static_range(1, RANKS):
        of = (rank + other) % RANKS
        for first in range(program * size, (program + 1) * size, BLOCK):
            i = first + tl.arange(0, BLOCK)
            there = (i < (program + 1) * size) & (of * part + i < numel)
            rows = tl.load(sums + of * part + i, mask=there, cache_modifier=".cg")
            tl.store(out + of * part + i, rows, mask=there)
    tl.store(epochs + program, epoch + 1)


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the ranks of a group share.

    Attributes:
        bases: [ranks] int64, addresses of `num_bytes(ranks)` bytes of each rank, zero at first.
        epochs: of each kernel, [PROGRAMS] int64, of this rank, zero at first.
        rank: of this process in the group.
        held: what keeps the bytes alive.
    """

    bases: torch.Tensor
    epochs: tuple[torch.Tensor, torch.Tensor]
    rank: int
    held: object


def _pad_bytes(ranks: int) -> int:
    return PROGRAMS * ranks * 8


def num_bytes(ranks: int) -> int:
    """Of the block that each rank shares: pads, two places, what others give, and sums."""
    slack = PROGRAMS * 16 * 4 * ranks  # parts are rounded up
    return 2 * _pad_bytes(ranks) + 2 * ONCE_BYTES + 2 * (PIECE_BYTES + slack)


def launch_all_reduce(x: torch.Tensor, shared: Shared) -> torch.Tensor:
    """The sum of all ranks' x [N], contiguous, of 2 or 4 bytes an element, in its dtype."""
    out, ranks = torch.empty_like(x), shared.bases.numel()
    common = {"RANKS": ranks, "LANES": next_power_of_2(ranks), **early_launch(x.device)}
    if x.nbytes <= ONCE_BYTES:
        quick(sum_once_kernel, (PROGRAMS,))(
            x, out, shared.bases, shared.epochs[0], x.numel(), shared.rank,
            PADS=0, PLACE=2 * _pad_bytes(ranks), HALF=ONCE_BYTES, BLOCK=4096, num_warps=16,
            **common,
        )  # fmt: skip
        return out
    inbox = 2 * _pad_bytes(ranks) + 2 * ONCE_BYTES
    sums = inbox + PIECE_BYTES + PROGRAMS * 16 * 4 * ranks
    length = PIECE_BYTES // x.element_size()
    for given, result in zip(x.split(length), out.split(length), strict=True):
        quick(sum_parts_kernel, (PROGRAMS,))(
            given, result, shared.bases, shared.epochs[1], given.numel(), shared.rank,
            PADS=_pad_bytes(ranks), INBOX=inbox, SUMS=sums, BLOCK=4096, num_warps=16, **common,
        )  # fmt: skip
    return out
