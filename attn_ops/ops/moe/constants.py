"""How the kernels of `experts` are launched.

T rows, S = T * top_k pairs of a row and an expert, E experts, K inputs, M outputs of a product.
"""

from typing import NamedTuple

from attn_ops.integers import next_power_of_2

MOST_ROWS = 128
"""Pairs of a block at most."""


class ExpertsConstants(NamedTuple):
    """Constants of a product's launch."""

    block_t: int  # pairs of a block, which share an expert
    block_m: int  # rows of the weight a program
    block_k: int
    num_warps: int
    num_stages: int


def rows_of_a_block(num_pairs: int, num_experts: int) -> int:
    """Pairs that a program multiplies: a power of two, from 16 to 128.

    At least a third more than the mean of an expert, as far as that goes: most experts then have
    one block, and their weights are read once.
    """
    wanted = -(-4 * num_pairs // (3 * num_experts))
    return min(max(16, next_power_of_2(wanted)), MOST_ROWS)


def most_blocks(num_pairs: int, num_experts: int, block_t: int) -> int:
    """Blocks that S pairs fill at most, however they are spread over E experts."""
    chosen = min(num_pairs, num_experts)
    return chosen + (num_pairs - chosen) // block_t


def experts_constants(
    k: int,
    num_pairs: int,
    num_experts: int,
    rows_along: bool = False,
    scale_k: int | None = None,
) -> ExpertsConstants:
    """For a product of K inputs. All forms of one `scale_k` give the same bits.

    Chosen by `python -m benchmarks.experts_forms` (one H100, 2026-11-27, commit 87843b0) at 1, 8,
    64, 512 and 2,048 rows of Qwen3-30B-A3B and GPT-OSS-20B, whose gate and up stood one behind the
    other there, not in turns. Other numbers of rows, and other models, were not tried.

    Args:
        rows_along: rows of the weight, not its inputs, lie side by side, as in GPT-OSS.
        scale_k: inputs of an FP8 weight that share a scale, each multiplied as a sum of its own;
            None: all of them, or there is none. With any, the forms are by `--fp8` (2026-11-28,
            commit 5e89927), and of blocks from 64 pairs on by `python -m benchmarks.experts --fp8`
            (one H100, 2026-11-28, commits fce27ed and 341064f side by side).
    """
    block_t = rows_of_a_block(num_pairs, num_experts)
    if scale_k is not None:
        if block_t >= 64 and (rows_along or num_pairs >= 512 * num_experts):
            return ExpertsConstants(block_t, 128, scale_k, 8, 3)
        return ExpertsConstants(min(block_t, 64), 64, scale_k, 4, 3)
    if block_t == MOST_ROWS:
        return ExpertsConstants(block_t, 256, 64, 8, 4)
    if block_t == 64:
        return ExpertsConstants(block_t, 128, 64 if k % 128 else 128, 8, 4)
    if rows_along:
        return ExpertsConstants(block_t, 128, 64, 4, 4)
    if k % 128 == 0:
        return ExpertsConstants(block_t, 64, 128, 4, 4)
    return ExpertsConstants(block_t, 64, 64, 4, 6)
