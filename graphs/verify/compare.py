"""How the results of a replay compare with those of a call.

R rows of logits, V vocabulary, P blocks, B block size, K kv heads, H head size, W rows of the cache
that a step writes.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch

TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-2,
}
"""Largest difference that passes, as a part of the called tensor's largest magnitude.

A replay is planned for other bounds than a call, so its kernels add in another order. FP8 caches
have that of bfloat16, and one step of the format on top.
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """How one tensor of the replay compares with the call's."""

    tensor: str
    difference: float  # the largest absolute one
    tolerance: float  # what passes; of FP8 besides a step of the format
    num_differing: int  # elements beyond it
    num_elements: int
    where: tuple[int, ...] = ()  # of the largest difference beyond it
    why: str = ""  # what else is wrong

    @property
    def ok(self) -> bool:
        return not self.num_differing

    def __str__(self) -> str:
        if self.why:
            return f"{self.tensor}: {self.why}"
        return (
            f"{self.tensor} differing by {self.difference:.4g} at {list(self.where)}, "
            f"{self.num_differing} of {self.num_elements} elements beyond {self.tolerance:.4g}"
        )


def compare(
    name: str,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    tolerance: float,
    step: torch.finfo | None = None,
) -> Finding:
    """The replay's tensor against the call's.

    Args:
        name: of the tensor.
        mine: the replay's.
        theirs: the call's.
        tolerance: as a part of the largest finite magnitude of `theirs`; not used for integers.
        step: of the format that both were rounded to; a step of each value passes besides.
    """
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        why = f"{mine.dtype} {list(mine.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
        return Finding(name, math.inf, 0.0, max(1, mine.numel()), mine.numel(), (), why)
    if not mine.numel():
        return Finding(name, 0.0, 0.0, 0, 0)
    if mine.is_floating_point():
        gap, allowed, bound = _gaps(mine, theirs, tolerance, step)
    else:
        gap, allowed, bound = (mine.long() - theirs.long()).abs(), torch.tensor(0), 0.0
    beyond = gap > allowed.to(gap.device)
    num_differing, where = int(beyond.sum()), ()
    if num_differing:
        worst = int(torch.where(beyond, gap, -1).argmax())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), mine.shape))
    return Finding(name, gap.max().item(), bound, num_differing, mine.numel(), where)


def _gaps(
    mine: torch.Tensor, theirs: torch.Tensor, tolerance: float, step: torch.finfo | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Differences of floats, those that pass, and the part of them that all elements share."""
    wide = torch.promote_types(mine.dtype, torch.float32)
    mine, theirs = mine.to(wide), theirs.to(wide)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())  # infinities of one sign too
    gap = torch.where(same, 0.0, (mine - theirs).abs()).nan_to_num_(math.inf, posinf=math.inf)
    size = theirs.abs().nan_to_num_(0.0, posinf=0.0)
    bound = tolerance * size.max()
    allowed = bound
    if step is not None:
        larger = torch.maximum(size, mine.abs().nan_to_num_(0.0, posinf=0.0))
        allowed = bound + step.eps * larger.clamp_(min=step.smallest_normal)
    return gap, allowed, bound.item()


def excused_rows(
    replayed: Mapping[str, torch.Tensor],
    called: Mapping[str, torch.Tensor],
    bound: float,
    draw: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor | None:
    """Rows [R] whose tokens differ but are equally right; None if none is."""
    mine_R, theirs_R, logits_RV = replayed["tokens"], called["tokens"], called["logits"]
    if not mine_R.shape == theirs_R.shape == logits_RV.shape[:-1] or mine_R.dim() != 1:
        return None
    differ_R = mine_R != theirs_R
    if not bool(differ_R.any()):
        return None
    if draw is not None:
        return differ_R & (draw(replayed["logits"]) == mine_R)
    last = logits_RV.shape[1] - 1
    known_R = (mine_R >= 0) & (mine_R <= last) & (theirs_R >= 0) & (theirs_R <= last)
    two_R2 = torch.stack([mine_R, theirs_R], 1).clamp(0, last)
    pair_R2 = logits_RV.gather(1, two_R2).double()
    return differ_R & known_R & ((pair_R2[:, 0] - pair_R2[:, 1]).abs() <= bound)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_halves(cache: torch.Tensor) -> torch.Tensor:
    """[P, n, B, K, H], n = 2 for keys and values; of a cache of latents [P, B, W] n and K are 1."""
    return cache if cache.dim() == 5 else cache[:, None, :, None]


def row_sums(cache: torch.Tensor) -> torch.Tensor:
    """A sum of the bits of every row [P, n, B] that also changes when elements trade places."""
    bits = cache.view(_BITS[cache.element_size()])  # of the same size, so any strides will do
    num_blocks, heads, size = cache.shape[0], *cache.shape[3:]
    weights_KH = torch.arange(heads * size, device=cache.device).view(heads, size) * 2 + 1
    # In parts, as the products are int64: 128 MiB at most.
    part = max(1, (1 << 24) // max(1, cache[0].numel()))
    sums = [(bits[i : i + part] * weights_KH).sum((3, 4)) for i in range(0, num_blocks, part)]
    return torch.cat(sums)


def stray_writes(
    layer: int, cache: torch.Tensor, before_P2B: torch.Tensor, slots_W: torch.Tensor
) -> Finding:
    """Rows that changed although the step does not own them; those of the null block may."""
    block_size = cache.shape[2]
    changed_P2B = row_sums(cache) != before_P2B
    changed_P2B[0] = False
    changed_P2B[slots_W // block_size, :, slots_W % block_size] = False
    name, num_rows = f"kv_caches[{layer}]", int(changed_P2B.sum())
    if not num_rows:
        return Finding(name, 0.0, 0.0, 0, changed_P2B.numel())
    block, which, offset = changed_P2B.nonzero()[0].tolist()
    why = f"{num_rows} rows written outside the step's slots, first [{block}, {which}, {offset}]"
    where = (block, which, offset)
    return Finding(name, math.inf, 0.0, num_rows, changed_P2B.numel(), where, why)


def checked_tolerances(
    tolerance: float | Mapping[torch.dtype, float] | None,
) -> dict[torch.dtype, float]:
    """`TOLERANCES` with a user's own in place; a ValueError says what is wrong with them."""
    if tolerance is None:
        return TOLERANCES
    own = tolerance if isinstance(tolerance, Mapping) else dict.fromkeys(TOLERANCES, tolerance)
    for dtype, value in own.items():
        if dtype not in TOLERANCES or not 0 <= value < math.inf:
            names = ", ".join(map(str, TOLERANCES))
            raise ValueError(
                "tolerance must be finite and not negative, of a known dtype, "
                f"got {value!r} for {dtype}; supported: {names}"
            )
    return {**TOLERANCES, **own}
