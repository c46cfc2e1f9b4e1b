"""The cache's and the step's operators on a GPU: captured, and to pinned memory and back.

P blocks, K kv heads, H head size, B block size, S requests, T tokens.
"""

import pytest
import torch

from attn_ops import advance_step, copy_blocks, gather_kv, merge_attn_states, swap_blocks
from attn_ops.ops.merge import reference_merge_attn_states

pytestmark = pytest.mark.gpu

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def captured(function):
    """A graph of `function`, run once before, and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def make_cache(num_blocks, dtype=torch.bfloat16, **options):
    return torch.randn(num_blocks, 2, 16, 2, 64, dtype=torch.float32).to(dtype).to(**options)


def moved(source, target, pairs):
    wanted = target.cpu().clone()
    for read, written in pairs:
        wanted[written] = source[read].cpu()
    return wanted


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8], ids=str)
def test_captured_copies_follow_the_pairs(dtype):
    caches = [make_cache(9, dtype, device="cuda") for _ in range(3)]
    pairs = torch.tensor([[5, 5]] * 4, device="cuda")
    graph, _ = captured(lambda: copy_blocks(caches, pairs))
    for new in ([[1, 2], [2, 3], [3, 1], [8, 8]], [[4, 5], [0, 6], [7, 7], [5, 4]]):
        wanted = [moved(cache, cache.cpu(), new) for cache in caches]
        pairs.copy_(torch.tensor(new))
        graph.replay()
        for cache, want in zip(caches, wanted, strict=True):
            assert torch.equal(cache.cpu(), want)


def test_copies_of_nothing_and_across_devices():
    cache = make_cache(4, device="cuda")
    copy_blocks([cache], torch.empty(0, 2, dtype=torch.int64, device="cuda"))
    with pytest.raises(ValueError, match=r"^block_pairs must be on the device of kv_caches\[0\]"):
        copy_blocks([cache], torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"^block_pairs must be on cpu"):
        swap_blocks(cache, cache.cpu(), torch.tensor([[1, 2]], device="cuda"))


@pytest.mark.parametrize("pinned", [True, False])
def test_swap_out_and_in(pinned):
    """On a side stream, ordered by events; the pairs are not in order and form three runs."""
    cache, host = make_cache(12, device="cuda"), make_cache(20)
    host = host.pin_memory() if pinned else host
    out = [[7, 3], [1, 10], [2, 11], [3, 12], [9, 0]]
    back = [[written, 11 - read] for read, written in out]
    wanted_host = moved(cache, host, out)
    wanted_cache = moved(wanted_host, cache, back)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        swap_blocks(cache, host, torch.tensor(out))
        done.record()
    done.synchronize()
    assert torch.equal(host, wanted_host)
    with torch.cuda.stream(stream):
        swap_blocks(host, cache, torch.tensor(back))
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(cache.cpu(), wanted_cache)


def test_swap_with_pinned_memory_does_not_wait():
    """The stream still sleeps when the calls return."""
    cache, host = make_cache(12, device="cuda"), make_cache(20).pin_memory()
    pairs, done = torch.tensor([[1, 2], [2, 3], [5, 9]]), torch.cuda.Event()
    swap_blocks(cache, host, pairs)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    swap_blocks(cache, host, pairs)
    swap_blocks(host, cache, pairs.flip(1))
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_swap_between_caches_of_one_gpu():
    source, target = make_cache(6, device="cuda"), make_cache(8, device="cuda")
    wanted = moved(source, target, [[1, 7], [2, 3], [3, 4]])
    swap_blocks(source, target, torch.tensor([[1, 7], [2, 3], [3, 4]]))
    assert torch.equal(target.cpu(), wanted)
    wanted = moved(target, target, [[1, 2], [2, 3]])
    swap_blocks(target, target, torch.tensor([[1, 2], [2, 3]]))
    assert torch.equal(target.cpu(), wanted)


@pytest.mark.parametrize("fp8", [False, True])
def test_captured_gather_follows_the_batch(fp8):
    cache = make_cache(20, torch.float8_e4m3fn if fp8 else torch.bfloat16, device="cuda")
    cache = cache.view(torch.uint8) if fp8 else cache
    scale = torch.tensor([0.4], device="cuda") if fp8 else None
    options = {"dtype": torch.float32, "k_scale": scale, "v_scale": scale}
    options["kv_cache_dtype"] = "fp8_e4m3" if fp8 else "auto"
    table = torch.zeros(3, 4, dtype=torch.int32, device="cuda")
    lengths = torch.zeros(3, dtype=torch.int32, device="cuda")
    graph, got = captured(lambda: gather_kv(cache, table, lengths, 70, **options))
    for seq_lens in ([5, 0, 60], [17, 33, 1], [64, 64, 64], [0, 0, 0]):
        table.copy_(torch.randperm(19)[:12].view(3, 4) + 1)
        lengths.copy_(torch.tensor(seq_lens))
        graph.replay()
        on_host = {n: x if x is None or isinstance(x, (str, torch.dtype)) else x.cpu()
                   for n, x in options.items()}  # fmt: skip
        wanted = gather_kv(cache.cpu(), table.cpu(), lengths.cpu(), 70, **on_host)
        for x, want in zip(got, wanted, strict=True):
            assert torch.equal(x.cpu(), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 32, 128), (300, 8, 80), (0, 8, 64), (17, 3, 256)], ids=str)
def test_merge(shape, dtype):
    """The kernel by the operator, captured, with rows that saw nothing and hold NaN."""
    out1, out2 = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    lse1, lse2 = (torch.randn(shape[:2], device="cuda") * 5 for _ in range(2))
    for out, lse in ((out1, lse1), (out2, lse2)):
        unseen = torch.rand(shape[:2], device="cuda") < 0.3
        lse[unseen] = float("-inf")
        out[unseen] = float("nan")
    wanted = reference_merge_attn_states(out1, lse1, out2, lse2)
    graph, results = captured(lambda: merge_attn_states(out1, lse1, out2, lse2))
    graph.replay()
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(dtype, 1e-5)
    for got in (results, merge_attn_states(out1, lse1, out2, lse2)):
        for x, want in zip(got, wanted, strict=True):
            assert (x.dtype, x.stride()) == (want.dtype, want.stride())
            torch.testing.assert_close(x, want, atol=tolerance, rtol=tolerance)


def test_captured_advance_step():
    state = {
        "input_tokens": torch.tensor([11, 12]),
        "positions": torch.tensor([1, 3]),
        "seq_lens": torch.tensor([2, 4], dtype=torch.int32),
        "slot_mapping": torch.tensor([5, 15]),
        "block_table": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        "paged_kv_indptr": torch.zeros(3, dtype=torch.int32),
        "paged_kv_indices": torch.zeros(4, dtype=torch.int32),
        "paged_kv_last_page_len": torch.zeros(2, dtype=torch.int32),
    }
    on_gpu = {name: tensor.cuda() for name, tensor in state.items()}
    sampled = torch.tensor([21, 22], device="cuda")
    graph, _ = captured(lambda: advance_step(sampled, **on_gpu, block_size=4))
    advance_step(sampled.cpu(), **state, block_size=4)  # as the run before the capture
    for step in range(3):
        sampled.add_(10)
        graph.replay()
        advance_step(sampled.cpu(), **state, block_size=4)
        for name, want in state.items():
            assert torch.equal(on_gpu[name].cpu(), want), (name, step)
