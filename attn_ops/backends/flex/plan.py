"""The builder of FLEX: which keys every row may see, and which tiles of keys a tile of rows visits.

The keys of all requests stand one request behind another. Whatever causality, window and lengths
say, a row sees an interval of them; so that one mask function serves every such layer, and the
tiles that a tile of rows visits are consecutive.

T rows (padded to whole tiles on CUDA), S requests, C keys of all requests (padded likewise),
I tiles of rows, J tiles of keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from attn_ops.compat.flex_lse_until_2_16 import compiles_with_lse
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
    Views,
)
from attn_ops.metadata.positions import PAD_SLOT_ID
from attn_ops.ops.cache_blocks import locate

KEY_TILE = 64
_MIN_ROWS = 128  # of a padded batch: below it FlexAttention would compile its decoding kernel too
_SHORT_QUERY, _SHORT_TILE = 16, 16  # up to here, the fewest rows that a tensor core takes
_LONG_TILE = 128


@dataclasses.dataclass(frozen=True, eq=False)
class FlexPlan:
    """The mask of one step for layers with one causality and window."""

    fused: bool  # for the compiled kernel, padded to whole tiles
    num_keys: int  # C
    row_tile: int  # rows of a tile
    rows_6T: torch.Tensor  # int32, what is known of each row, in the order of the properties
    num_tiles_11I: torch.Tensor  # int32, tiles of keys that a tile of rows visits
    tiles_11IJ: torch.Tensor  # int32, which ones, in order

    @property
    def first_key_T(self) -> torch.Tensor:
        """First key that a row sees."""
        return self.rows_6T[0]

    @property
    def end_key_T(self) -> torch.Tensor:
        """Behind the last one."""
        return self.rows_6T[1]

    @property
    def alive_T(self) -> torch.Tensor:
        """1 for a row that is not padding and whose request has keys."""
        return self.rows_6T[2]

    @property
    def start_T(self) -> torch.Tensor:
        """Where the keys of the row's request start."""
        return self.rows_6T[3]

    @property
    def position_T(self) -> torch.Tensor:
        """Place of the row in its sequence."""
        return self.rows_6T[4]

    @property
    def request_T(self) -> torch.Tensor:
        return self.rows_6T[5]


class FlexMetadataBuilder(AttentionMetadataBuilder):
    """Computes the plan on the device; the host gives the number of keys."""

    cudagraph_support = AttentionCGSupport.NEVER
    plans_on_host = needs_mirrors = True

    def _planned(
        self,
        specs: Sequence[AttentionSpec],
        common: CommonAttentionMetadata,
        views: Views | None = None,
    ) -> AttentionMetadata:
        """A plan a mask, made now, while the lengths are those of the step."""
        metadata = AttentionMetadata(common, self.backend, block_size=self.block_size, views=views)
        for spec in specs:
            mask_plan(metadata, spec.causal, spec.sliding_window)
        return metadata


class CustomMaskMetadataBuilder(FlexMetadataBuilder):
    """Without the virtual batches, in which requests and positions are not those of the mask.

    Chunked layers, `CustomMaskSupport` refuses.
    """

    def use_cascade_attention(self, *args: Any, **keywords: Any) -> bool:
        """Never: `build` refuses a shared prefix."""
        return False

    def _build_cascade(self, length: int, common: CommonAttentionMetadata) -> AttentionMetadata:
        raise ValueError(
            f"common_prefix_len must be 0 with the mask of backend {self.backend.name}, "
            f"got {length}; supported: 0"
        )


def plan_of(meta: AttentionMetadata, spec: AttentionSpec) -> FlexPlan | None:
    """The step's plan for layers of geometry `spec`, which is as causal as the batch."""
    return mask_plan(meta, spec.causal, spec.sliding_window)


def mask_plan(meta: AttentionMetadata, causal: bool, sliding_window: int | None) -> FlexPlan | None:
    """The step's plan for layers of any geometry with this causality and window.

    Made on first use: a batch without a cache has no builder.
    """
    key = ("mask", causal, sliding_window)
    return meta.once(key, lambda: make_plan(meta.common, causal, sliding_window))


def key_slots_of(meta: AttentionMetadata, num_keys: int, block_size: int) -> torch.Tensor:
    """Slot of every key [C] int64, request by request: once a step, for all layers.

    PAD_SLOT_ID behind the last key.
    """

    def make() -> torch.Tensor:
        common = meta.common
        block_C, offset_C, owned_C = locate(
            common.block_table_tensor, common.seq_lens, num_keys, block_size
        )
        return torch.where(owned_C, block_C * block_size + offset_C, PAD_SLOT_ID)

    return meta.once(("slots", num_keys, block_size), make)


def make_plan(
    common: CommonAttentionMetadata, causal: bool, sliding_window: int | None
) -> FlexPlan | None:
    """The plan, or None where no row sees a key.

    Raises:
        ValueError: `common.seq_lens_cpu` is not given.
    """
    if common.seq_lens_cpu is None:
        raise ValueError("seq_lens_cpu must be given, got None; FLEX plans on the host")
    num_rows, num_keys = common.num_actual_tokens, int(common.seq_lens_cpu.sum())
    row_tile = _LONG_TILE
    if num_rows == 0 or num_keys == 0:
        return None
    if sliding_window is not None:
        # A position plus the window must fit int32. No row is farther than this from a key: with
        # fewer keys than rows, as in cross-attention, positions start below 0.
        sliding_window = min(sliding_window, common.max_seq_len + common.max_query_len)
    fused = runs_fused(common.device)
    if fused:
        # One tile, or few rows, would be compiled apart from more.
        row_tile = _SHORT_TILE if common.max_query_len <= _SHORT_QUERY else _LONG_TILE
        num_rows = max(_MIN_ROWS, 2 * row_tile, _round_up(num_rows, row_tile))
        num_keys = max(2 * KEY_TILE, _round_up(num_keys, KEY_TILE))
    return _plan(common, causal, sliding_window, fused, num_rows, num_keys, row_tile)


def runs_fused(device: torch.device) -> bool:
    """Whether the kernel is compiled."""
    return compiles_with_lse(device)


def _plan(
    common: CommonAttentionMetadata,
    causal: bool,
    sliding_window: int | None,
    fused: bool,
    num_rows: int,
    num_keys: int,
    row_tile: int,
) -> FlexPlan:
    row_T = torch.arange(num_rows, dtype=torch.int32, device=common.device)
    ends_S = common.query_start_loc[1 : common.num_reqs + 1].contiguous()
    request_T = torch.searchsorted(ends_S, row_T, right=True, out_int32=True)
    owned_T = (request_T < common.num_reqs) & (row_T < common.num_actual_tokens)
    request_T = request_T.clamp(max=common.num_reqs - 1)
    length_T = common.seq_lens[request_T]
    start_T = (common.seq_lens.cumsum(0, dtype=torch.int32) - common.seq_lens)[request_T]
    position_T = length_T - (ends_S[request_T] - row_T)
    first_T, end_T = torch.zeros_like(position_T), length_T
    if causal:
        end_T = torch.minimum(end_T, position_T + 1)
    if sliding_window is not None:
        first_T = (position_T - sliding_window + 1).clamp(min=0)
        end_T = torch.minimum(end_T, position_T + sliding_window)
    alive_T = owned_T & (length_T > 0)
    first_T = start_T + first_T
    end_T = torch.where(alive_T, start_T + end_T, 0)
    num_tiles_I, tiles_IJ = _tiles(first_T, end_T, num_keys, row_tile)
    rows_6T = torch.stack([first_T, end_T, alive_T.int(), start_T, position_T, request_T])
    tiles = num_tiles_I[None, None], tiles_IJ[None, None]
    return FlexPlan(fused, num_keys, row_tile, rows_6T, *tiles)


def _tiles(
    first_T: torch.Tensor, end_T: torch.Tensor, num_keys: int, row_tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles of keys each tile of rows visits, and which; int32 [I] and [I, J]."""
    num_key_tiles = -(-num_keys // KEY_TILE)
    pad = _round_up(first_T.shape[0], row_tile) - first_T.shape[0]
    sees_T = first_T < end_T
    first_T = torch.where(sees_T, first_T, num_keys)
    end_T = torch.where(sees_T, end_T, 0)
    first_I = torch.nn.functional.pad(first_T, (0, pad), value=num_keys).view(-1, row_tile).amin(1)
    end_I = torch.nn.functional.pad(end_T, (0, pad)).view(-1, row_tile).amax(1)
    first_I, end_I = first_I // KEY_TILE, (end_I + KEY_TILE - 1) // KEY_TILE
    tile_J = torch.arange(num_key_tiles, dtype=torch.int32, device=first_T.device)
    tiles_IJ = (first_I[:, None] + tile_J).clamp(max=num_key_tiles - 1)
    return (end_I - first_I).clamp(min=0).int(), tiles_IJ.int()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
