"""What a backend of latent attention gives to the forward that all of them share.

T tokens, D rows, N query heads, P head size without RoPE, R with RoPE, V head size of values,
Lkv latent, P blocks, B block size.
"""

import dataclasses
from collections.abc import Callable

import torch

Decode = Callable[..., torch.Tensor]
"""decode(ql_nope [D, N, Lkv], q_pe [D, N, R], kv_cache [P, B, Lkv + R], part, *, scale,
kv_cache_dtype, kv_scale, lse, plan) -> [D, N, Lkv]: q attends to the latents, which are the values
too.

`part` is a `CommonAttentionMetadata` of these rows; a request's rows are its last, and each sees
the keys up to its own. Rows behind the last request's, and rows without keys, become zero; NaN in
them is not read. `lse` [D, N] float32 is written where it is given, -inf for such rows. `plan` is
what the builder's `plan_decode` gave. Strides of ql_nope and q_pe are free but for the last.
"""

DecodeProject = Callable[..., torch.Tensor]
"""The same with w_uv [N, V, Lkv] after `part`: the result times W_UV, [D, N, V]."""

Absorb = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""absorb(q_nope [D, N, P], w_uk [N, P, Lkv]) -> [D, N, Lkv]: the product before `decode`.

The decode that is called next, with this result, is the backend's own.
"""

Prefill = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""prefill(q [T, N, P + R], k [Tk, N, P + R], v [Tk, N, V], cu_q, cu_k, max_q, max_k, *, scale,
causal, with_lse) -> ([T, N, V], [T, N] float32 or None): requests one after the other.

cu_q and cu_k [S + 1] int32 say where a request's rows and keys begin. Causal, the last row sees
all keys and each before it one less. Every request has rows and keys.
"""


@dataclasses.dataclass(frozen=True)
class MLAKernels:
    """The kernels of one backend, at module level: what holds them must be picklable."""

    decode: Decode
    prefill: Prefill
    decode_project: DecodeProject | None = None  # in place of `decode` and a product behind it
    absorb: Absorb | None = None  # in place of a batched product of torch
