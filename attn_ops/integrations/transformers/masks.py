"""The masks that a model makes for its layers, compared with what the layers ask attention for.

Q rows, for which masks are compared.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from attn_ops.integrations.transformers.probe import ProbedCall
from attn_ops.metadata import AttentionSpec
from attn_ops.tracing import PATCHING

MOST_KEYS = 2**17
"""Keys up to which masks are compared; a longer window looks like none."""


class LayerMask:
    """Replaces the mask that a model makes for its layers, and keeps the function that made it.

    A model may read its shape, move it and take all of it. Computing with it is a ValueError: the
    operators read the batch's metadata instead, so the result would be lost.
    """

    def __init__(self, function: Callable[..., torch.Tensor], like: torch.Tensor) -> None:
        self.function = function
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.ndim = like.dim()

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> "LayerMask":
        return self

    def contiguous(self) -> "LayerMask":
        return self

    def __getitem__(self, index: Any) -> "LayerMask":
        """Itself, if the index takes all of it, as `[..., : key.shape[-2]]` does."""
        if torch.empty(self.shape, device="meta")[index].shape != self.shape:
            _refuse_arithmetic("a part of it")
        return self

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse_arithmetic("values written to it")

    def __getattr__(self, name: str) -> Any:
        _refuse_arithmetic(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_arithmetic(getattr(func, "__name__", str(func)))

    def rows(self, rows_Q: torch.Tensor, num_keys: int) -> torch.Tensor:
        """[Q, num_keys] bool: which keys the rows at these indices see."""
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        keys = torch.arange(num_keys, device=self.device)
        seen = self.function(zero, zero, rows_Q.unsqueeze(1), keys.unsqueeze(0))
        return seen.expand(rows_Q.shape[0], num_keys)


class MaskError(ValueError, AttributeError):
    """A model computes with its mask. Also an AttributeError, so that `hasattr` answers False."""


def _refuse_arithmetic(name: str) -> NoReturn:
    raise MaskError(
        "attention_mask must reach attention as it was made, as the batch's metadata stands in for "
        f"it, got {name}; supported: causal masks, sliding windows, chunks"
    )


def _arithmetic(name: str) -> Callable[..., Any]:
    return lambda self, *others: _refuse_arithmetic(name)


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    setattr(LayerMask, f"__{_name}__", _arithmetic(_name))
    setattr(LayerMask, f"__r{_name}__", _arithmetic(_name))
for _name in ("neg", "invert", "bool", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(LayerMask, f"__{_name}__", _arithmetic(_name))


@contextlib.contextmanager
def tagged_masks(name: str) -> Iterator[None]:
    """Models with `attn_implementation=name` make `LayerMask`s inside the block."""
    from transformers.masking_utils import AttentionMaskInterface

    thread = threading.get_ident()

    def tag(*args: Any, **kwargs: Any) -> LayerMask | None:
        if threading.get_ident() != thread:
            return untagged(*args, **kwargs)
        sizes = (kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"])
        like = torch.empty(sizes, dtype=torch.bool, device=kwargs["device"])
        return LayerMask(kwargs["mask_function"], like)

    with PATCHING:
        untagged = AttentionMaskInterface()[name]
        AttentionMaskInterface.register(name, tag)
        try:
            yield
        finally:
            AttentionMaskInterface.register(name, untagged)


def check_masks(calls: Sequence[ProbedCall], longest: int) -> None:
    """The mask that a layer is given hides what its options hide, and nothing else."""
    seen: set[tuple] = set()
    for call in calls:
        if not isinstance(call.mask, LayerMask):
            continue  # a run without masks; `_check_extras` refuses tensors
        key = (id(call.mask), call.spec)
        if key in seen:
            continue
        seen.add(key)
        difference = _difference(call.mask, call.spec, min(longest, MOST_KEYS))
        if difference is not None:
            row, key_row, sees = difference
            raise ValueError(
                f"attention of {call.name} must be given the mask that its options describe "
                f"(sliding_window={call.spec.sliding_window}, attention_chunk_size="
                f"{call.spec.attention_chunk_size}, causal={call.spec.causal}), got one in which "
                f"token {row} {'sees' if sees else 'does not see'} token {key_row}"
            )


def _difference(mask: LayerMask, spec: AttentionSpec, longest: int) -> tuple[int, int, bool] | None:
    """Row, key, and whether the mask lets the row see it, where the options say otherwise."""
    rows = sorted({0, 1, 2, 7, 8, 63, 64, longest // 2, longest - 1} & set(range(longest)))
    try:
        rows_Q = torch.tensor(rows, device=mask.device)
        sees_QK = mask.rows(rows_Q, longest)
    except (IndexError, RuntimeError):  # its function reads tensors of this batch
        rows_Q = torch.arange(mask.shape[-2], device=mask.device)
        sees_QK = mask.rows(rows_Q, mask.shape[-1])
    wanted_QK = _allowed(spec, rows_Q, sees_QK.shape[1])
    differ = (sees_QK != wanted_QK).nonzero()
    if not differ.numel():
        return None
    row, key = differ[0].tolist()
    return int(rows_Q[row]), key, bool(sees_QK[row, key])


def _allowed(spec: AttentionSpec, rows_Q: torch.Tensor, num_keys: int) -> torch.Tensor:
    """[Q, num_keys] bool: which keys a row of one sequence sees."""
    row, key = rows_Q.unsqueeze(1), torch.arange(num_keys, device=rows_Q.device).unsqueeze(0)
    allowed = key <= row if spec.causal else torch.ones_like(key <= row)
    if spec.sliding_window is not None:
        allowed &= key > row - spec.sliding_window
    if spec.attention_chunk_size is not None:
        allowed &= key // spec.attention_chunk_size == row // spec.attention_chunk_size
    return allowed
