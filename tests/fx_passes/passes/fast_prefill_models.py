"""Models and random batches for the tests of fast_prefill.

T rows of the batch, S requests, R logits rows, D hidden size, N query heads, K kv heads, H head
size.
"""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attn_ops import AttentionSpec, CommonAttentionMetadata, attention, get_backend
from attn_ops.integrations.transformers import attention_specs, dynamic_batch
from attn_ops.integrations.transformers.batch import compute_all_rows
from fx_passes.config import PassConfig
from fx_passes.pipeline import run_dynamo_stage

D, N, K, H, VOCAB = 32, 4, 2, 8, 64
BLOCK_SIZE = 4
WIDTH = 5  # blocks of a request


class Layer(nn.Module):
    """Attention over the cache that is given, and an MLP. Writes to it if it has k and v."""

    def __init__(self, *, writes: bool = True) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(D, N * H), nn.Linear(N * H, D, bias=False)
        self.kv = nn.Linear(D, 2 * K * H) if writes else None
        self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.norm = nn.RMSNorm(D)

    def forward(self, h: torch.Tensor, kv_cache: torch.Tensor, batch: dict) -> torch.Tensor:
        x = self.norm(h)
        if self.kv is not None:
            write(self.kv(x), kv_cache, batch)
        q_TNH = self.q(x)[0].unflatten(-1, (N, H))
        out = attention(q_TNH, kv_cache, batch["attn_metadata"], H**-0.5)
        h = h + self.o(out.flatten(1)).unsqueeze(0)
        return h + self.mlp(h)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(self.norm(h))))


def write(kv: torch.Tensor, kv_cache: torch.Tensor, batch: dict) -> None:
    """By the operator itself, as traced for a GPU; `attn_ops.write_kv` is torch code on a CPU."""
    k_TKH, v_TKH = kv[0].unflatten(-1, (2, K, H)).unbind(1)
    torch.ops.attn_ops.write_kv.default(
        k_TKH, v_TKH, kv_cache, batch["attn_metadata"], slot_mapping=batch["slot_mapping"]
    )


class Model(nn.Module):
    """Embeddings, `run`, and logits of the rows that are asked for."""

    num_caches = 0

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, D), nn.Embedding(64, D)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.RMSNorm(D), nn.Linear(D, VOCAB, bias=False)

    def forward(self, input_ids, position_ids, kv_caches, logits_to_keep, **batch):
        h = self.embed(input_ids) + self.place(position_ids)
        return self.finish(self.norm(self.run(h, kv_caches, batch)), logits_to_keep)

    def run(self, h: torch.Tensor, kv_caches: list[torch.Tensor], batch: dict) -> torch.Tensor:
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            h = layer(h, kv_cache, batch)
        return h

    def finish(self, h: torch.Tensor, logits_to_keep: torch.Tensor) -> Any:
        return self.head(h[:, logits_to_keep])

    @property
    def specs(self) -> list[AttentionSpec]:
        return [AttentionSpec(N, K, H, torch.float32)] * self.num_caches


class Plain(Model):
    """Two layers with a cache each."""

    num_caches = 2

    def __init__(self) -> None:
        super().__init__(Layer(), Layer())


class Yoco(Model):
    """The first half has caches of its own; the second reads one that the first half's end fills.

    "You only cache once", arXiv:2405.05254.
    """

    num_caches = 3

    def __init__(self, num_readers: int = 3) -> None:
        super().__init__(Layer(), Layer(), *(Layer(writes=False) for _ in range(num_readers)))
        self.shared = nn.Linear(D, 2 * K * H)

    def run(self, h, kv_caches, batch):
        for layer, kv_cache in zip(self.layers[:2], kv_caches[:2], strict=True):
            h = layer(h, kv_cache, batch)
        write(self.shared(h), kv_caches[2], batch)
        for layer in self.layers[2:]:
            h = layer(h, kv_caches[2], batch)
        return h


class TwoStage(Model):
    """Stage one fills all caches from the embeddings; stage two reads them, and one is written
    between two reads.
    """

    num_caches = 3

    def __init__(self) -> None:
        super().__init__(*(Layer(writes=False) for _ in range(3)))
        self.first = nn.ModuleList(nn.Linear(D, 2 * K * H) for _ in range(3))

    def run(self, h, kv_caches, batch):
        x = h
        for make, kv_cache in zip(self.first[:2], kv_caches[:2], strict=True):
            write(make(x), kv_cache, batch)
        h = self.layers[0](h, kv_caches[0], batch)
        h = self.layers[1](h, kv_caches[1], batch)
        write(self.first[2](x * 2), kv_caches[2], batch)
        return self.layers[2](h, kv_caches[2], batch)


def seeded(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2)
    return model.eval().requires_grad_(False)


# -- batches ---------------------------------------------------------------------------------------

KINDS = ("mixed", "prefill", "decode", "several", "padded", "one request")


@dataclasses.dataclass
class Step:
    """Keywords of a model, and how many of the logits count."""

    keywords: dict[str, Any]
    num_logits: int

    def copy(self) -> "Step":
        """With caches of its own."""
        caches = [c.clone() for c in self.keywords["kv_caches"]]
        return Step(copy.copy(self.keywords) | {"kv_caches": caches}, self.num_logits)


def specs_of(model: Any) -> list[AttentionSpec]:
    return model.specs if isinstance(model, Model) else attention_specs(model)


class Batches:
    """Random steps over caches of random numbers."""

    def __init__(self, model: Any, seed: int = 0) -> None:
        self.specs = specs_of(model)
        backend = get_backend("TORCH")
        self.builder = backend.builder(backend, self.specs, BLOCK_SIZE, "cpu")
        self.generator = torch.Generator().manual_seed(seed)

    def number(self, low: int, high: int) -> int:
        """From low to high."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def step(self, kind: str) -> Step:
        num_reqs = 1 if kind == "one request" else self.number(2, 5)
        query = [1 if kind == "decode" else self.number(1, 7) for _ in range(num_reqs)]
        computed = [0 if kind == "prefill" else self.number(0, 9) for _ in range(num_reqs)]
        if kind == "mixed":
            query[:1] = [1]
        logits = [1] * num_reqs
        if kind == "several":
            logits = [min(n, self.number(0, 3)) for n in query]
            logits[-1] = max(logits[-1], 1)
        padding = self.number(1, 3) if kind == "padded" else 0
        return self.of(query, computed, logits, padding)

    def of(
        self, query: list[int], computed: list[int], logits: list[int], padding: int = 0
    ) -> Step:
        """`logits`: so many last rows of each request. `padding`: so many rows and logits more."""
        num_rows = sum(query) + padding
        owned = 1 + torch.randperm(len(query) * WIDTH, generator=self.generator)
        seq_lens = [q + c for q, c in zip(query, computed, strict=True)]
        common = CommonAttentionMetadata.from_lengths(
            query, seq_lens, owned.int().view(-1, WIDTH), BLOCK_SIZE, num_padded_tokens=num_rows
        )
        assert common.query_start_loc_cpu is not None
        positions = common.positions
        assert positions is not None
        ends = common.query_start_loc_cpu[1:].tolist()
        rows = [end - i for end, n in zip(ends, logits, strict=True) for i in range(n, 0, -1)]
        indices = torch.tensor(rows + [0] * padding, dtype=torch.int64)
        common = common.replace(logits_indices_padded=indices, num_logits_indices=len(rows))
        ids = torch.randint(1, VOCAB, (1, num_rows), generator=self.generator)
        keywords = {
            "input_ids": ids,
            "position_ids": positions[None].clone(),
            "attn_metadata": self.builder.build(0, common),
            "kv_caches": [self._cache(spec) for spec in self.specs],
            "slot_mapping": common.slot_mapping.clone(),
            "logits_to_keep": indices,
            "use_cache": False,
        }
        return Step(keywords, len(rows))

    def _cache(self, spec: AttentionSpec) -> torch.Tensor:
        shape = (5 * WIDTH + 1, 2, BLOCK_SIZE, spec.num_kv_heads, spec.head_size)
        return torch.randn(shape, generator=self.generator)


# -- running ---------------------------------------------------------------------------------------


def eager_backend(config: PassConfig | None = None) -> Callable:
    """A backend of torch.compile: our passes on the Dynamo graph, and no compiler behind them."""
    config = config or PassConfig(fast_prefill="on", outline_layers=False)

    def backend(gm: torch.fx.GraphModule, example_inputs: list) -> Callable:
        run_dynamo_stage(gm, config)
        return gm.forward

    return backend


def call(model: Callable, step: Step) -> Any:
    return model(**step.keywords)


def logits_of(result: Any) -> torch.Tensor:
    result = getattr(result, "logits", result)
    return result[0] if isinstance(result, tuple) else result


def compiled(model: nn.Module, backend: Callable | str | None = None, **options: Any) -> Callable:
    """The model compiled for batches of every size, by a first step of 17 rows and 5 requests."""
    if not isinstance(model, Model):
        compute_all_rows(model)
    fast = torch.compile(model, backend=backend or eager_backend(), fullgraph=True, **options)
    step = Batches(model, seed=99).of([2, 3, 4, 1, 7], [3, 0, 1, 5, 0], [1] * 5)
    names = ("input_ids", "position_ids", "slot_mapping", "logits_to_keep")
    with dynamic_batch(**{name: step.keywords[name] for name in names}):
        call(fast, step)
    return fast


def compare(model: Callable, fast: Callable, step: Step, *, exact: bool = True) -> None:
    """Logits within 1e-5; caches equal to the bit, or, if not `exact`, 1e-5 of the largest."""
    other = step.copy()
    wanted = logits_of(call(model, step))[:, : step.num_logits]
    got = logits_of(call(fast, other))[:, : step.num_logits]
    scale = 1.0 if exact else max(1.0, wanted.abs().amax().item())
    torch.testing.assert_close(got, wanted, atol=1e-5 * scale, rtol=1e-5)
    for ours, theirs in zip(other.keywords["kv_caches"], step.keywords["kv_caches"], strict=True):
        tolerance = 0.0 if exact else 1e-5
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def record_of(recorder: Any) -> Any:
    """What the one run of the pass noted."""
    (record,) = (p for p in recorder.passes if p.pass_name == "fast_prefill")
    return record
