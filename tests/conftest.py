"""Shared by all tests: environment, a fresh Dynamo after tests that compile, batches, tiny models.

T tokens, S requests, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

import hypothesis
import torch.fx.experimental._config as symbolic_shapes_config
from torch._dynamo.utils import counters

from attn_ops import AttentionMetadata, AttentionSpec, Backend, CommonAttentionMetadata, get_backend

hypothesis.settings.register_profile("attn_ops", database=None, derandomize=True, deadline=None)
hypothesis.settings.load_profile("attn_ops")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Equal random numbers for every test, and nothing compiled left behind."""
    torch.manual_seed(0)
    graphs = counters["stats"]["unique_graphs"]
    yield
    if counters["stats"]["unique_graphs"] != graphs or counters["frames"]:
        torch._dynamo.reset()
        flex = sys.modules.get("attn_ops.backends.flex.attend")
        if flex is not None:
            flex.compiled.cache_clear()  # it says once which sizes change
        counters.clear()


@dataclasses.dataclass
class Batch:
    """A step's metadata and tensors: q [T, N, H], k, v [T, K, H], kv_cache [P, 2, B, K, H]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_cache: torch.Tensor
    meta: AttentionMetadata

    @property
    def common(self) -> CommonAttentionMetadata:
        return self.meta.common


def build_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    num_padding_rows: int = 0,
    causal: bool = True,
    written: bool = True,
    backend: Backend | None = None,
    seed: int = 0,
    num_blocks: int | None = None,
) -> Batch:
    """A batch over a cache of shuffled blocks.

    The cache is NaN wherever no token stands, the null block included. Padding rows of q are NaN.
    `written`: whether this step's own keys and values are in the cache.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    width = max([1, *(-(-n // block_size) for n in seq_lens)])
    num_blocks = num_blocks or len(seq_lens) * width + 2
    owned = torch.randperm(num_blocks - 1, generator=generator)[: len(seq_lens) * width] + 1
    table_SM = owned.int().view(len(seq_lens), width)
    kv_cache = torch.full(
        (num_blocks, 2, block_size, num_kv_heads, head_size), float("nan"), dtype=dtype
    )
    for blocks, query, tokens in zip(table_SM, query_lens, seq_lens, strict=True):
        for position in range(tokens if written else tokens - query):
            block, offset = blocks[position // block_size], position % block_size
            kv_cache[block, :, offset] = randn(2, num_kv_heads, head_size)
    rows = sum(query_lens) + num_padding_rows
    common = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table_SM, block_size, num_padded_tokens=rows
    )
    common = dataclasses.replace(common, causal=causal)
    q = randn(rows, num_heads, head_size)
    q[sum(query_lens) :] = float("nan")
    backend = backend or get_backend("TORCH")
    spec = AttentionSpec(num_heads, num_kv_heads, head_size, dtype)
    meta = backend.builder(backend, [spec], block_size, "cpu").build(0, common)
    return Batch(
        q,
        randn(rows, num_kv_heads, head_size),
        randn(rows, num_kv_heads, head_size),
        kv_cache,
        meta,
    )


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return build_batch


@pytest.fixture(scope="session")
def as_dynamic() -> Callable[[], contextlib.AbstractContextManager]:
    """First calls of compiled functions belong inside: Dynamo then takes a size of 1 as dynamic."""
    return lambda: symbolic_shapes_config.patch(backed_size_oblivious=True)


@pytest.fixture(scope="session")
def num_graphs() -> Callable[[], int]:
    """How many graphs Dynamo has made so far."""
    return lambda: counters["stats"]["unique_graphs"]


_SHARING = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": [f"{t}_attention" for t in ("sliding", "sliding", "full", "sliding", "full")],
    "head_dim": 16,
    "sliding_window": 6,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 10}),
    "phi3": ("Phi3Config", {"pad_token_id": 0, "sliding_window": 7}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "query_pre_attn_scalar": 10,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Layer 3 shares the cache of layer 1, layer 4 that of layer 2.
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_SHARING,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**_SHARING, "global_head_dim": 32, "use_double_wide_mlp": True},
    ),
}
"""Config class and sizes; models whose layers share caches fix their number of layers."""


def build_model(
    name: str = "llama", attn_implementation: str = "attn_ops", num_layers: int = 2, **overrides
):
    """A Transformers model of a few thousand weights, large enough for its attention to matter."""
    transformers = pytest.importorskip("transformers")
    from attn_ops.integrations.transformers import register

    register()
    config_name, own = CONFIGS[name]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    config = getattr(transformers, config_name)(**{**sizes, **own, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attn_implementation
    ).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("sinks"):
            parameter.data.normal_(0, 0.2 if parameter.dim() > 1 else 1.0)
    return model.requires_grad_(False)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., torch.nn.Module]:
    return build_model


@dataclasses.dataclass
class Prompts:
    """Prompts of a model as the keywords of one prefill step over a poisoned cache."""

    token_ids: list[list[int]]
    caches: list[torch.Tensor]
    keywords: dict

    @property
    def last_rows(self) -> list[int]:
        return self.keywords["attn_metadata"].common.query_start_loc_cpu[1:].sub(1).tolist()


def build_prompts(
    model: torch.nn.Module, lengths: Sequence[int], block_size: int = 4, seed: int = 0
) -> Prompts:
    from attn_ops import PagedKVCache
    from attn_ops.integrations.transformers import attention_specs

    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 64, (n,), generator=generator).tolist() for n in lengths]
    specs = attention_specs(model)
    cache = PagedKVCache(specs, num_tokens=128, block_size=block_size)
    for tensor in cache.tensors:
        tensor[1:] = float("nan")
    for request, n in enumerate(lengths):
        cache.reserve(request, n)
    table_SM = cache.block_table(range(len(lengths)))
    common = CommonAttentionMetadata.from_lengths(lengths, lengths, table_SM, block_size)
    backend = get_backend("TORCH")
    keywords = {
        "input_ids": torch.tensor([[i for prompt in ids for i in prompt]]),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "attn_metadata": backend.builder(backend, specs, block_size, "cpu").build(0, common),
        "kv_caches": cache.tensors,
        "slot_mapping": common.slot_mapping,
        "use_cache": False,
    }
    return Prompts(ids, cache.tensors, keywords)


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., Prompts]:
    return build_prompts
