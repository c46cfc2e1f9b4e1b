"""How large the cache of a session becomes: on a CPU, with a GPU's memory made up."""

import dataclasses
import types

import pytest
import torch

from attn_ops import AttentionSpec
from attn_ops.kv_cache import bytes_per_block
from graphs import cache_size
from graphs.cache_size import WORKSPACE_BYTES, Windows, largest_step
from graphs.options import SessionOptions
from tests.kit.models import build_model
from tests.kit.sessions import PROMPTS, make_session

SIZES = {"max_batch_size": 4, "max_tokens": 64, "block_size": 4}
MIB = 2**20


@dataclasses.dataclass
class Gpu:
    """Memory of a GPU that is not there: each step takes `peak` bytes and leaves `stays`."""

    total: int = 64 * MIB
    in_use: int = 16 * MIB
    peak: int = 2 * MIB
    stays: int = MIB
    num_runs: int = 0
    reserved: int = 0

    def synchronize(self, device=None):
        self.num_runs += 1
        self.in_use += self.stays
        self.reserved = self.peak

    def install(self, monkeypatch):
        monkeypatch.setattr(cache_size, "is_rationed", lambda device: True)
        fakes = {
            "mem_get_info": lambda device=None: (self.total - self.in_use, self.total),
            "memory_reserved": lambda device=None: 0,
            "max_memory_reserved": lambda device=None: self.reserved,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "synchronize": self.synchronize,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        return self


def sized(model, **options):
    session = make_session(model, **options)
    size = session.cache_size
    assert session.report().cache == size
    assert (size.num_tokens, size.num_bytes) == (
        session.cache.num_usable_tokens,
        session.cache.num_bytes,
    )
    return size


def test_on_a_cpu_every_request_has_room(model):
    size = sized(model)
    assert (size.num_tokens, size.parts) == (4 * 64, {})
    assert size.why == "every request of the batch at its longest"
    assert "256 tokens" in str(size)
    assert "every request" in str(make_session(model).report())


def test_as_asked_for(model, monkeypatch):
    gpu = Gpu(in_use=64 * MIB).install(monkeypatch)
    size = sized(model, cache_tokens=90)
    assert (size.num_tokens, size.why) == (92, "as asked for by cache_tokens")
    assert gpu.num_runs == 0


def test_what_is_small_is_not_measured(model, monkeypatch):
    gpu = Gpu().install(monkeypatch)
    size = sized(model)
    assert (size.num_tokens, gpu.num_runs) == (4 * 64, 0)
    assert "less than half of what is left" in size.why
    shared = sized(model, share_prefixes=True)
    assert shared.num_tokens == 8 * 4 * 64
    assert "to keep prefixes" in shared.why


def test_what_is_left(model, monkeypatch):
    gpu = Gpu().install(monkeypatch)
    session = make_session(model, max_batch_size=30_000, cudagraph_mode="NONE")
    size, cache = session.cache_size, session.cache
    parts = size.parts
    assert gpu.num_runs == 1
    rows = min(30_000, 2048)
    logits = rows * session.vocab_size * 8
    assert parts["step"] == gpu.peak + logits
    assert parts["in_use"] == 17 * MIB
    assert parts["graphs"] == 0
    assert parts["left"] == int(64 * MIB * 0.9) - 17 * MIB - gpu.peak - logits
    assert parts["left"] - cache.bytes_per_block < size.num_bytes <= parts["left"]
    assert size.why.startswith("what is left of the GPU, 0.9 of 64.0 MiB less 17.0 MiB in use")
    assert "for a step of 2,048 tokens" in size.why
    assert session.generate(PROMPTS, 6) == make_session(model).generate(PROMPTS, 6)


def test_memory_fraction(model, monkeypatch):
    Gpu().install(monkeypatch)
    options = {"max_batch_size": 30_000, "cudagraph_mode": "NONE"}
    more, less = (sized(model, memory_fraction=f, **options) for f in (1, 0.5))
    assert more.num_tokens > less.num_tokens
    for bad in (0, 1.5, -0.1, True, "0.9", float("nan")):
        with pytest.raises(ValueError, match=r"^memory_fraction must be over 0 and at most 1, got"):
            make_session(model, memory_fraction=bad)


def test_room_for_all_though_it_was_measured(model, monkeypatch):
    wanted = 4 * 64 / 4 * bytes_per_block(make_session(model).specs, 4)
    Gpu(total=int(32 * wanted), in_use=int(27 * wanted), peak=0, stays=0).install(monkeypatch)
    size = sized(model, cudagraph_mode="NONE", max_tokens_per_step=4)
    assert size.num_tokens == 4 * 64
    assert size.why.startswith("every request of the batch at its longest; ")
    assert size.parts["left"] > size.num_bytes


def test_graphs_are_counted(model, monkeypatch):
    Gpu(total=256 * MIB).install(monkeypatch)
    plan = make_session(model, max_batch_size=30_000, cache_tokens=64).plan
    monkeypatch.setattr(type(plan), "first_keys", lambda self: [1])
    for estimated, want in ((MIB, MIB + WORKSPACE_BYTES), (None, None)):
        value = property(lambda self, estimated=estimated: estimated)
        monkeypatch.setattr(type(plan), "estimated_bytes", value)
        parts = sized(model, max_batch_size=30_000, cudagraph_mode="NONE").parts
        assert parts["graphs"] == (want or parts["step"])


def test_too_little_is_refused(model, monkeypatch):
    Gpu(in_use=57 * MIB, peak=0, stays=0).install(monkeypatch)
    want = r"^max_tokens must fit into the cache, got 64, which take .* left for it are 0 B: 0.9 of"
    with pytest.raises(ValueError, match=want):
        make_session(model, max_batch_size=30_000, cudagraph_mode="NONE")


def test_a_step_that_does_not_fit_is_refused(model, monkeypatch):
    Gpu().install(monkeypatch)

    def forward(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    mine = build_model()
    session = make_session(mine, cache_tokens=64)
    monkeypatch.setattr(type(session.runner), "call", forward)
    with pytest.raises(ValueError, match=r"^max_tokens_per_step must fit into .* got 2,048 tokens"):
        make_session(mine, max_batch_size=30_000, cudagraph_mode="NONE")


def test_sizes_that_no_machine_has(model):
    with pytest.raises(ValueError, match=r"^max_batch_size must be at most 65536, got 1000000000"):
        make_session(model, max_batch_size=10**12)
    with pytest.raises(ValueError, match=r"^num_tokens .* must fit into the memory of cpu"):
        make_session(model, max_batch_size=65536, block_size=2**20)


@pytest.mark.parametrize("max_tokens", [1, 7, 100])
@pytest.mark.parametrize("max_batch_size", [1, 3, 20])
@pytest.mark.parametrize("budget", [1, 5, 64, 3000])
def test_the_largest_step(max_tokens, max_batch_size, budget):
    rows = largest_step(max_tokens, max_batch_size, budget)
    assert 1 <= len(rows) <= max_batch_size
    assert sum(s.num_tokens for s in rows) == min(budget, max_tokens * max_batch_size)
    assert all(1 <= s.num_tokens <= max_tokens == s.length for s in rows)
    assert all(s.wants_token and len(s.tokens()) == s.num_tokens for s in rows)
    assert [s.num_tokens > 1 for s in rows] == sorted(s.num_tokens > 1 for s in rows)
    if budget >= max_batch_size:
        assert len(rows) == max_batch_size


GIB = 2**30
MODELS = {  # layers, every so many of which see all keys; heads, KV heads, head size; window
    "gemma-3-12b": (48, 6, 16, 8, 256, 1024),
    "gpt-oss-120b": (36, 2, 64, 8, 64, 128),
}


def windows_of(name: str, options: SessionOptions, *, takes_windows: bool = True) -> Windows:
    layers, every, *heads, window = MODELS[name]
    specs = [
        AttentionSpec(*heads, torch.bfloat16, sliding_window=window if (i + 1) % every else None)
        for i in range(layers)
    ]
    config = types.SimpleNamespace(_attn_implementation="attn_ops")
    config.get_text_config = lambda: config
    model = types.SimpleNamespace(config=config)
    return Windows.of(specs, options, model, types.SimpleNamespace(takes_windows=takes_windows))


@pytest.mark.parametrize(
    ("name", "same", "own"), [("gemma-3-12b", 768, 152), ("gpt-oss-120b", 144, 73)]
)
def test_bytes_of_64_requests(name, same, own):
    options = SessionOptions(max_batch_size=64, max_tokens=32_768)
    num_blocks = options.num_cache_tokens // options.block_size + 1
    found = windows_of(name, options)
    assert round(found.num_bytes(num_blocks) / GIB) == own
    assert round(num_blocks * (found.bytes_whole + found.bytes_window) / GIB) == same


def test_tokens_in_80_gib():
    options = SessionOptions(max_batch_size=64, max_tokens=32_768)
    found = windows_of("gemma-3-12b", options)
    one_kind = windows_of("gemma-3-12b", options, takes_windows=False)
    assert found.fitting(80 * GIB) * options.block_size == 921_520
    assert one_kind.fitting(80 * GIB) * options.block_size == 218_448
    for number in (2, 500, 10_000):
        assert found.num_bytes(found.fitting(number * GIB // 10)) <= number * GIB // 10


def test_prefixes_leave_room_for_layers_that_see_all_keys():
    """As many blocks of windows as leave every request its longest; at least those of a batch."""
    options = SessionOptions(max_batch_size=64, max_tokens=32_768)
    batch = windows_of("gemma-3-12b", options)
    found = windows_of("gemma-3-12b", dataclasses.replace(options, share_prefixes=True))
    wanted = options.num_cache_tokens // options.block_size + 1
    assert (batch.num_blocks, found.num_blocks) == (batch.least_blocks, 8 * batch.least_blocks)
    assert batch.within(80 * GIB, wanted) is batch
    numbers = []
    for size in (80, 140, 170, 400, 1000):
        given = found.within(size * GIB, wanted)
        assert given.within(size * GIB, wanted) is given
        assert given.num_bytes(given.fitting(size * GIB)) <= size * GIB
        numbers.append((given.num_blocks, given.fitting(size * GIB) >= wanted))
    assert [room for _, room in numbers] == [False, False, True, True, True]
    in_80_gib = found.within(80 * GIB, wanted).fitting(80 * GIB)
    assert in_80_gib * options.block_size == 921_520
    assert numbers[0][0] == batch.least_blocks
    assert numbers[0][0] < numbers[2][0] < numbers[4][0] == found.num_blocks
