"""`MLAWorkspace`: where the prefill way gathers latents before it up-projects them.

Lkv latent, R head size with RoPE, N query heads, P head size without RoPE, V head size of values.
"""

from collections.abc import Sequence

import torch

from attn_ops.backends.mla.plan import MAX_WORKSPACE_TOKENS, workspace_tokens
from attn_ops.metadata import AttentionSpec


class MLAWorkspace:
    """Memory for latents of the tokens that are up-projected together.

    Its owner is who makes it: a builder that is given none makes one. Layers use it one after the
    other, so one is enough for a model. It takes no memory before a step needs it.

    Args:
        specs: geometry of the layers; those without latent attention do not count.
        num_tokens: tokens that it holds.
        device: where it lives.

    Raises:
        ValueError: `num_tokens` is below 1, no layer has latent attention, or they have several
            dtypes.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        num_tokens: int = MAX_WORKSPACE_TOKENS // 2,
        device: torch.device | str = "cpu",
    ) -> None:
        self.specs = tuple(dict.fromkeys(spec for spec in specs if spec.latent is not None))
        if not self.specs:
            raise ValueError("specs must have a layer with latent attention, got none")
        if len(dtypes := {spec.dtype for spec in self.specs}) > 1:
            raise ValueError(
                f"specs must have one dtype, got {', '.join(sorted(map(str, dtypes)))}"
            )
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        self.num_tokens, self.device = num_tokens, torch.device(device)
        self._tensor: torch.Tensor | None = None

    @classmethod
    def for_model(
        cls,
        specs: Sequence[AttentionSpec],
        *,
        max_model_len: int,
        max_num_seqs: int,
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "MLAWorkspace":
        """By the size rule of vLLM, see `workspace_tokens`."""
        return cls(specs, workspace_tokens(max_model_len, max_num_seqs, block_size), device)

    @property
    def width(self) -> int:
        """Lkv + R of the widest layer."""
        return max(spec.head_size for spec in self.specs)

    @property
    def tensor(self) -> torch.Tensor:
        """[num_tokens, width] in the layers' dtype; allocated by the first that asks."""
        if self._tensor is None:
            size, dtype = (self.num_tokens, self.width), self.specs[0].dtype
            with torch.inference_mode(False):  # else steps outside of that mode could not write it
                self._tensor = torch.empty(size, dtype=dtype, device=self.device)
        return self._tensor

    def check(self, specs: Sequence[AttentionSpec], block_size: int, device: torch.device) -> None:
        """Raise a ValueError unless layers of these geometries can use it."""
        if self.num_tokens < block_size:
            raise ValueError(
                f"workspace must hold at least a page of {block_size} tokens, got {self.num_tokens}"
            )
        if self.device.type != device.type:
            raise ValueError(f"workspace must be on {device}, got {self.device}")
        for spec in specs:
            got = self.width, self.specs[0].dtype
            if spec.latent is not None and (got[0] < spec.head_size or got[1] != spec.dtype):
                raise ValueError(
                    f"workspace must be at least {spec.head_size} wide and of {spec.dtype}, "
                    f"got {got[0]} and {got[1]}"
                )

    @property
    def num_bytes(self) -> int:
        """Of the tensor, allocated or not."""
        return self.num_tokens * self.width * self.specs[0].dtype.itemsize

    @property
    def up_projected_bytes(self) -> int:
        """Most bytes of keys and values that are made of it at a time."""
        return max(
            self.num_tokens * spec.num_heads * sum(_columns(spec)) * spec.dtype.itemsize
            for spec in self.specs
        )

    def rows(self, num_tokens: int, spec_width: int) -> torch.Tensor:
        """[num_tokens, spec_width]: its first rows, for a layer of that width."""
        return self.tensor[:num_tokens, :spec_width]

    def reserve(self, max_num_tokens: int) -> int:
        """Allocate what the largest step takes, and free it: a profile run then sees the peak.

        Args:
            max_num_tokens: most rows of a step.

        Returns:
            Bytes, the workspace's own among them.
        """
        most = 0
        for spec in self.specs:
            assert spec.latent is not None, "others are left out"
            sizes = [(self.num_tokens, spec.num_heads, n) for n in _columns(spec)]
            # The result, a chunk's, and both merged.
            sizes += [(max_num_tokens, spec.num_heads, spec.latent.v_head_dim)] * 3
            like = {"dtype": spec.dtype, "device": self.device}
            most = max(most, sum(t.nbytes for t in [torch.empty(size, **like) for size in sizes]))
        return most + self.tensor.nbytes


def _columns(spec: AttentionSpec) -> tuple[int, int]:
    """P + R of keys and V of values."""
    assert spec.latent is not None, "others are left out"
    return spec.latent.qk_head_dim, spec.latent.v_head_dim
