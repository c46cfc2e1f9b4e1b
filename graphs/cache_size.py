"""How many tokens the cache of a session holds, and why.

Asked for: `cache_tokens`. Otherwise every request of the batch at its longest; on a GPU no more
than is left of it, measured only where it may be too little. Where other layers of the model see
all keys, layers with a window have blocks of their own, as many as a full batch needs: blocks
before the window are given back, so a request owns few of them, whatever its length.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from attn_ops import AttentionSpec, PagedKVCache
from attn_ops.block_pool import NULL_BLOCK, BlockTable
from attn_ops.kv_cache import bytes_per_block, has_window, window_of
from attn_ops.states import StatePool, StateSpec
from graphs.capture.memory import human
from graphs.capture.plan import CapturePlan
from graphs.options import SessionOptions
from graphs.requests.batch import Rows, Scheduled
from graphs.requests.blocks import STRIDE
from graphs.requests.requests import Request
from graphs.runner import StepRunner
from graphs.sampling import SamplingParams
from graphs.sampling.params import Sampling

LEAST_CHECKPOINTS = 8
"""States behind prefixes, if prefixes are shared; else one a request."""

LOGITS_BYTES = 8
"""A logit in float32, twice: what sampling takes at a time."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU, whoever uses them."""

    total: int
    in_use: int


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """What a step takes."""

    peak: int  # bytes while it runs
    after: DeviceMemory  # when it is over: with workspaces that stay


def is_rationed(device: torch.device) -> bool:
    """Whether a cache takes what is left of the device: of a GPU."""
    return device.type == "cuda"


def memory_of(device: torch.device) -> DeviceMemory | None:
    """That of a GPU; None of another device."""
    if not is_rationed(device):
        return None
    torch.cuda.empty_cache()  # what the allocator keeps for later counts as left
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, total - free)


def measured(runner: StepRunner, max_tokens: int, max_tokens_per_step: int) -> StepMemory:
    """Run the largest step, uncompiled, and see what it takes.

    Compiled steps take less, as Inductor uses buffers again.

    Args:
        runner: of the uncompiled model on a small cache: requests have the null block everywhere.
        max_tokens: of a request.
        max_tokens_per_step: token budget.

    Raises:
        ValueError: the step does not fit into the memory of the device.
    """
    rows = largest_step(max_tokens, runner.max_batch_size, max_tokens_per_step)
    null = BlockTable([NULL_BLOCK] * runner.max_blocks)
    for pool in (runner.cache.pool, runner.cache.window_pool):
        if pool is not None:
            pool.tables.update({s.request.id: null for s in rows})
    memory_of(runner.device)
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_reserved(runner.device)
    try:
        runner.builder.profile_run(max_tokens_per_step)
        with torch.compiler.set_stance("force_eager"):
            runner.call(rows, Sampling.GREEDY)
        torch.cuda.synchronize(runner.device)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            "max_tokens_per_step must fit into the memory of the device, "
            f"got {max_tokens_per_step:,} tokens: {error}"
        ) from error
    peak = torch.cuda.max_memory_reserved(runner.device) - before
    after = memory_of(runner.device)
    assert after is not None, "the device is a GPU"
    return StepMemory(peak + len(rows) * runner.vocab_size * LOGITS_BYTES, after)


def largest_step(max_tokens: int, max_batch_size: int, budget: int) -> Rows:
    """A step of as many tokens and requests as there may be, all of them at their longest.

    Decodes come first, then prompts.
    """
    num_prompts = min(max_batch_size, -(-budget // max_tokens))
    num_decodes = max(0, min(max_batch_size, budget) - num_prompts)
    rest = min(budget - num_decodes, num_prompts * max_tokens)
    lengths = [1] * num_decodes
    lengths += [rest // num_prompts + (i < rest % num_prompts) for i in range(num_prompts)]
    prompt = [0] * max_tokens
    none: frozenset[int] = frozenset()
    sampling = SamplingParams(seed=0)
    rows = []
    for number in lengths:
        request = Request(len(rows), prompt, 1, sampling, none, none, max_tokens)
        rows.append(Scheduled(request, number, max_tokens - number, max_tokens, True, max_tokens))
    return Rows(rows)


SHARED_TIMES = 8
"""Where requests share prefixes, blocks stay after them: room for so many times the batch."""


@dataclasses.dataclass(frozen=True)
class Windows:
    """Sizes of a cache whose layers may be of both kinds.

    Attributes:
        num_blocks: those that layers with a window need, the null block among them; None: all
            layers have the same blocks.
        bytes_whole, bytes_window: of a block in the caches of layers that see all keys, and of the
            others.
        least_blocks: of `num_blocks`, those of a batch that keeps no prefixes.
    """

    num_blocks: int | None
    bytes_whole: int
    bytes_window: int
    least_blocks: int = 0

    @classmethod
    def of(
        cls, specs: Sequence[AttentionSpec], options: SessionOptions, model: Any, builder: Any
    ) -> "Windows":
        """What layers need.

        All have the same blocks where whole lengths are reserved, and where the backend's builder
        does not take two kinds.

        Args:
            specs: of the layers.
            options: of the session.
            model: uncompiled; layers of Transformers models take slots of both kinds.
            builder: of the attention metadata.
        """
        windowed = [spec for spec in specs if has_window(spec)]
        whole = [spec for spec in specs if not has_window(spec)]
        sizes = [bytes_per_block(some, options.block_size) for some in (whole, windowed)]
        config = model.config.get_text_config()
        may = getattr(config, "_attn_implementation", None) == "attn_ops"
        may = may and options.lookahead is not None
        if not (may and whole and windowed and builder.takes_windows):
            return cls(None, *sizes)
        times = SHARED_TIMES if options.share_prefixes else 1
        least = _blocks_of_a_batch(windowed, options)
        return cls(times * least, *sizes, least_blocks=least)

    def num_bytes(self, num_blocks: int) -> int:
        """Of so many blocks of layers that see all keys, the null block among them."""
        own = num_blocks if self.num_blocks is None else min(num_blocks, self.num_blocks)
        return num_blocks * self.bytes_whole + own * self.bytes_window

    def within(self, num_bytes: int, wanted: int) -> "Windows":
        """The same; with fewer blocks for prefixes, where so many bytes hold too few others.

        Args:
            num_bytes: that the cache may take.
            wanted: blocks of layers that see all keys, the null block among them.
        """
        if self.num_blocks is None or self.fitting(num_bytes) >= wanted:
            return self
        left = (num_bytes - wanted * self.bytes_whole) // self.bytes_window
        number = min(self.num_blocks, max(self.least_blocks, left))
        return self if number == self.num_blocks else dataclasses.replace(self, num_blocks=number)

    def fitting(self, num_bytes: int) -> int:
        """The most blocks of layers that see all keys, in so many bytes."""
        same = num_bytes // (self.bytes_whole + self.bytes_window)
        if self.num_blocks is None or same <= self.num_blocks:
            return same
        return (num_bytes - self.num_blocks * self.bytes_window) // self.bytes_whole


def _blocks_of_a_batch(windowed: Sequence[AttentionSpec], options: SessionOptions) -> int:
    """Enough for a full batch that decodes, and for two steps of prompts beside it."""
    size, lookahead = options.block_size, options.lookahead or 0
    window = max(window_of(spec) or 0 for spec in windowed)
    tokens = max(window, size + 1) + size + max(STRIDE, lookahead) + lookahead
    prompts = 2 * options.max_tokens_per_step
    return 1 + options.max_batch_size * (-(-tokens // size) + 2) + -(-prompts // size)


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """What a session's cache was sized to.

    Attributes:
        num_tokens: that it holds.
        num_bytes: that they take, the null block included.
        why: who decided it.
        parts: bytes of the GPU where they were measured: total, in_use, weights (among those in
            use), step, graphs and left. Else empty.
        window_blocks: of layers with a window, where they have their own; see `PagedKVCache`.
    """

    num_tokens: int
    num_bytes: int
    why: str
    parts: dict[str, int] = dataclasses.field(default_factory=dict)
    window_blocks: int | None = None

    def __str__(self) -> str:
        return f"{self.num_tokens:,} tokens, {human(self.num_bytes)}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Sizing:
    """Decides the size; the device is only asked where the caller has asked for no size.

    Args:
        options: of the session.
        specs: of its layers.
        weights: bytes of the model.
        graphs: bytes that graphs may take; None: not known, as much as a step.
        windows: blocks of layers with a window.
    """

    options: SessionOptions
    specs: Sequence[AttentionSpec]
    weights: int
    graphs: int | None
    windows: Windows

    def decide(self, device: torch.device, measure: Callable[[], StepMemory]) -> CacheSize:
        """The size on a device; `measure` runs the largest step.

        Raises:
            ValueError: what is left of the GPU does not hold a request of `max_tokens`.
        """
        wanted = self.options.num_cache_tokens
        if self.options.cache_tokens is not None:
            return self._size(wanted, "as asked for by cache_tokens")
        memory = memory_of(device)
        why = "every request of the batch at its longest"
        if self.options.share_prefixes:
            wanted, why = SHARED_TIMES * wanted, f"{SHARED_TIMES} times {why}, to keep prefixes"
        if memory is None:
            return self._size(wanted, why)
        budget = int(memory.total * self.options.memory_fraction) - memory.in_use
        if self._bytes(wanted) <= budget // 2:
            return self._size(wanted, f"{why}; that is less than half of what is left")
        return self._left(measure(), wanted, why)

    def _left(self, step: StepMemory, wanted: int, why: str) -> CacheSize:
        """What is left beside a step and graphs, and no more than is wanted."""
        total, fraction = step.after.total, self.options.memory_fraction
        graphs = step.peak if self.graphs is None else self.graphs
        left = int(total * fraction) - step.after.in_use - step.peak - graphs
        block_size = self.options.block_size
        windows = self.windows.within(left, self._blocks(self.options.num_cache_tokens))
        if windows is not self.windows:
            return dataclasses.replace(self, windows=windows)._left(step, wanted, why)
        num_tokens = max(0, self.windows.fitting(left) - 1) * block_size
        sizes = (
            f"{fraction} of {human(total)} less {human(step.after.in_use)} in use (weights "
            f"{human(self.weights)}), {human(step.peak)} for a step of "
            f"{self.options.max_tokens_per_step:,} tokens and {human(graphs)} for graphs"
        )
        if num_tokens < self.options.max_tokens:
            raise ValueError(
                f"max_tokens must fit into the cache, got {self.options.max_tokens:,}, which take "
                f"{human(self._bytes(self.options.max_tokens))}; left for it are "
                f"{human(max(0, left))}: {sizes}; a smaller max_tokens_per_step, fewer "
                "capture_sizes or a larger memory_fraction leave more"
            )
        parts = {"total": total, "in_use": step.after.in_use, "weights": self.weights}
        parts |= {"step": step.peak, "graphs": graphs, "left": left}
        if num_tokens >= wanted:
            return self._size(wanted, f"{why}; {human(left)} are left, {sizes}", parts)
        return self._size(num_tokens, f"what is left of the GPU, {sizes}", parts)

    def _size(self, num_tokens: int, why: str, parts: dict[str, int] | None = None) -> CacheSize:
        size = self.options.block_size
        num_blocks = -(-num_tokens // size)
        own = self.windows.num_blocks
        if own is not None and own < num_blocks + 1:
            why += f"; layers with a window have {own:,} blocks of their own"
        else:
            own = None
        return CacheSize(num_blocks * size, self._bytes(num_tokens), why, parts or {}, own)

    def _bytes(self, num_tokens: int) -> int:
        """Of so many tokens."""
        return self.windows.num_bytes(self._blocks(num_tokens))

    def _blocks(self, num_tokens: int) -> int:
        """That hold so many tokens, and the null block."""
        return -(-num_tokens // self.options.block_size) + 1


WORKSPACE_BYTES = 32 * 2**20
"""That cuBLAS keeps for the stream of captures (H200, torch 2.11)."""


def no_attention(model: Any) -> AttentionSpec:
    """Of a small cache that nobody writes, for a model without attention: it counts tokens."""
    return AttentionSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype=model.dtype)


class Owner(Protocol):
    """What is read of a `DecodeSession`."""

    original: Any
    device: torch.device
    specs: list[AttentionSpec]
    state_specs: list[StateSpec]
    plan: CapturePlan
    builder: Any


def made_cache(
    owner: Owner, options: SessionOptions, runner_of: Callable[..., StepRunner]
) -> tuple[CacheSize, PagedKVCache]:
    """The cache and why it is as large as it is.

    Args:
        owner: the session.
        options: its options.
        runner_of: makes a `StepRunner` of `model` and `cache`.

    Raises:
        ValueError: it does not fit into the memory of the device.
    """
    more = {
        "block_size": options.block_size,
        "device": owner.device,
        "cache_layout": options.cache_layout,
        "states": None,
    }
    if owner.state_specs:  # first: what they take is not left for blocks
        more["states"] = StatePool(
            owner.state_specs,
            options.max_batch_size,
            owner.device,
            options.num_draft_tokens,
            max(LEAST_CHECKPOINTS, options.max_batch_size) if options.share_prefixes else 0,
        )

    def measure() -> StepMemory:
        cache = PagedKVCache(owner.specs, num_tokens=options.block_size, **more)
        runner = runner_of(model=owner.original, cache=cache)
        return measured(runner, options.max_tokens, options.max_tokens_per_step)

    graphs = 0
    if owner.plan.first_keys() and options.debug is None:
        estimated = owner.plan.estimated_bytes
        graphs = None if estimated is None else estimated + WORKSPACE_BYTES
    windows = Windows.of(owner.specs, options, owner.original, owner.builder)
    sizing = Sizing(options, owner.specs, _bytes_of(owner.original), graphs, windows)
    size = sizing.decide(owner.device, measure)
    more |= {"window_blocks": size.window_blocks, "can_sleep": options.can_sleep}
    return size, PagedKVCache(owner.specs, num_tokens=size.num_tokens, **more)


def _bytes_of(model: torch.nn.Module) -> int:
    """Of its parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
