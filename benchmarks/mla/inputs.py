"""Batches of equal requests over several layers, so many that they outgrow the L2 cache.

T rows, S requests, N query heads, P head size without RoPE, R with RoPE, V head size of values,
Lkv latent, B block size.
"""

import dataclasses
from functools import cached_property

import torch

from attn_ops import CommonAttentionMetadata
from attn_ops.backends.measure import l2_bytes
from attn_ops.metadata import KV_CACHE_DTYPES, AttentionSpec, LatentShape

L2_BYTES = 50 << 20  # of an H200
MAX_LAYERS = 64
DEEPSEEK = LatentShape(512, 128, 64, 128)  # of V2 and V3


@dataclasses.dataclass(frozen=True)
class Shape:
    """A batch of equal requests of one geometry."""

    heads: int
    num_reqs: int
    context: int  # keys of a request, the new ones included
    query_len: int = 1
    kv_cache_dtype: str = "auto"
    block_size: int = 32
    latent: LatentShape = DEEPSEEK

    @property
    def name(self) -> str:
        drafts = "" if self.query_len == 1 else f"x{self.query_len}"
        return f"{self.heads} heads {self.num_reqs}{drafts}x{self.context}"

    @property
    def scale(self) -> float:
        return self.latent.qk_head_dim**-0.5

    @property
    def fp8(self) -> torch.dtype | None:
        return KV_CACHE_DTYPES[self.kv_cache_dtype]

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec.of_latent(
            self.heads, self.latent, torch.bfloat16, kv_cache_dtype=self.kv_cache_dtype
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the latents that a layer reads."""
        item = 2 if self.fp8 is None else 1
        return self.num_reqs * self.context * self.latent.cache_width * item

    @property
    def weight_bytes(self) -> int:
        """Bytes of `kv_b_proj`."""
        one = self.latent
        return 2 * self.heads * (one.qk_nope_head_dim + one.v_head_dim) * one.kv_lora_rank

    @property
    def pairs(self) -> int:
        """Query rows times keys that they see, of one head."""
        hidden = self.query_len * (self.query_len - 1) // 2
        return self.num_reqs * (self.query_len * self.context - hidden)

    @property
    def decode_flops(self) -> int:
        """Of both products over the latents."""
        one = self.latent
        return 2 * self.heads * self.pairs * (one.cache_width + one.kv_lora_rank)

    @property
    def prefill_flops(self) -> int:
        """Of both products over up-projected keys, and of the up-projection."""
        one = self.latent
        attend = 2 * self.heads * self.pairs * (one.qk_head_dim + one.v_head_dim)
        return attend + self.num_reqs * self.context * self.weight_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """One batch over several layers, each with a cache, a weight and queries of its own."""

    shape: Shape
    common: CommonAttentionMetadata
    q: list[torch.Tensor]  # each [T, N, P + R]
    ql_nope: list[torch.Tensor]  # each [T, N, Lkv], strides as a batched product leaves them
    caches: list[torch.Tensor]  # each [blocks, B, Lkv + R]
    kv_b: list[torch.Tensor]  # each [N * (P + V), Lkv]
    kv_scale: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        return self.caches[0].device

    def q_pe(self, layer: int) -> torch.Tensor:
        return self.q[layer][:, :, self.shape.latent.qk_nope_head_dim :]

    def q_nope(self, layer: int) -> torch.Tensor:
        return self.q[layer][:, :, : self.shape.latent.qk_nope_head_dim]

    def by_head(self, layer: int) -> torch.Tensor:
        """[N, P + V, Lkv]."""
        return self.kv_b[layer].view(self.shape.heads, -1, self.shape.latent.kv_lora_rank)

    def w_uk(self, layer: int) -> torch.Tensor:
        return self.by_head(layer)[:, : self.shape.latent.qk_nope_head_dim]

    def w_uv(self, layer: int) -> torch.Tensor:
        return self.by_head(layer)[:, self.shape.latent.qk_nope_head_dim :]

    def absorbed(self, layer: int) -> torch.Tensor:
        """[T, N, Lkv]: q through W_UK."""
        return torch.bmm(self.q_nope(layer).transpose(0, 1), self.w_uk(layer)).transpose(0, 1)

    def projected(self, layer: int, latent: torch.Tensor) -> torch.Tensor:
        """latent [T, N, Lkv] through W_UV: [T, N, V]."""
        return torch.bmm(latent.transpose(0, 1), self.w_uv(layer).mT).transpose(0, 1)

    @cached_property
    def stored(self) -> list[torch.Tensor]:
        """The caches in the dtype that they mean."""
        fp8 = self.shape.fp8
        return self.caches if fp8 is None else [cache.view(fp8) for cache in self.caches]

    def first_request(self, layer: int = 0) -> torch.Tensor:
        """What attention makes of the first request's rows: [query_len, N, Lkv] float32."""
        shape, common = self.shape, self.common
        rank, blocks = shape.latent.kv_lora_rank, -(-shape.context // shape.block_size)
        kv = self.stored[layer][common.block_table_tensor[0, :blocks].long()].flatten(0, 1)
        kv = kv[: shape.context].float()
        if self.kv_scale is not None:
            kv = kv * self.kv_scale
        rows = slice(0, shape.query_len)
        q = torch.cat([self.ql_nope[layer][rows], self.q_pe(layer)[rows]], 2).float()
        scores = torch.einsum("qnl,cl->nqc", q, kv) * shape.scale
        key = torch.arange(shape.context, device=kv.device)
        scores.masked_fill_(key > key[shape.context - shape.query_len :, None], float("-inf"))
        return torch.einsum("nqc,cl->qnl", scores.softmax(-1), kv[:, :rank])


def num_layers(shape: Shape, device: torch.device) -> int:
    """As many as outgrow the L2 cache three times, at least two, at most half of the memory."""
    if device.type != "cuda":
        return 2
    wanted = 3 * max(L2_BYTES, l2_bytes(device))
    most = torch.cuda.mem_get_info(device)[0] // 2 // max(shape.kv_bytes + shape.weight_bytes, 1)
    return max(1, min(MAX_LAYERS, max(2, -(-wanted // shape.kv_bytes)), most))


def make_layers(shape: Shape, device: torch.device, most: int = MAX_LAYERS) -> Layers:
    """Random layers, at most `most`."""
    one, generator = shape.latent, torch.Generator(device).manual_seed(0)
    width = -(-shape.context // shape.block_size)
    num_blocks = shape.num_reqs * width + 1
    table = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    common = CommonAttentionMetadata.from_lengths(
        [shape.query_len] * shape.num_reqs, [shape.context] * shape.num_reqs,
        table.int().view(shape.num_reqs, width), shape.block_size, device,
    )  # fmt: skip
    rows = shape.num_reqs * shape.query_len

    def randn(*size: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.empty(size, dtype=torch.bfloat16, device=device)
        return x.normal_(0.0, scale, generator=generator)

    def cache() -> torch.Tensor:
        values = randn(num_blocks, shape.block_size, one.cache_width)
        return values if shape.fp8 is None else values.to(shape.fp8).view(torch.uint8)

    count = range(min(num_layers(shape, device), most))
    width_b = shape.heads * (one.qk_nope_head_dim + one.v_head_dim)
    layers = Layers(
        shape, common,
        [randn(rows, shape.heads, one.qk_head_dim) for _ in count],
        [],
        [cache() for _ in count],
        [randn(width_b, one.kv_lora_rank, scale=one.qk_nope_head_dim**-0.5) for _ in count],
        None if shape.fp8 is None else torch.ones(1, device=device),
    )  # fmt: skip
    layers.ql_nope.extend(layers.absorbed(layer) for layer in count)
    return layers
