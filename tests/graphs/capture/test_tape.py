"""The CPU's CUDA graph does what a CUDA graph does, the bad included."""

import pytest
import torch

import attn_ops
from attn_ops import get_backend
from tests.graphs.capture.tape import TapeRecorder, TapeSegments

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def record(run, **options):
    recorder = TapeRecorder(**options)
    recorder.warm_up(run)
    graph, num_bytes = recorder.record(run)
    return graph, num_bytes


def test_replay_reads_the_inputs_of_now_and_runs_no_python():
    x, out, factor, calls = torch.ones(4), torch.zeros(4), [2], []

    def run():
        calls.append(None)
        y = x[:2] * factor[0] + 1
        out[2:].copy_(y.view(1, 2)[0])
        out[0].add_(1)

    graph, num_bytes = record(run)
    assert len(calls) == 2
    out.zero_()
    x.fill_(5)
    factor[0] = 100
    for count in (1, 2):
        graph.replay()
        assert out.tolist() == [count, 0, 11, 11]  # the host's 2 is frozen
    assert len(calls) == 2
    assert num_bytes > 0


def test_recording_changes_nothing_and_its_memory_is_garbage():
    state, kept = torch.arange(3.0), []

    def run():
        kept.append(state * 2)
        state.add_(1)

    TapeRecorder().record(run)
    assert state.tolist() == [0, 1, 2]
    assert kept[0].isnan().all()


def test_synchronisation_is_refused_and_leaves_nothing_behind():
    x, recorder = torch.ones(3), TapeRecorder()

    def run():
        x.add_(1)
        if x.sum() > 0:
            x.add_(1)

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorder.record(run)
    assert x.tolist() == [1, 1, 1]
    assert recorder.segments.num_open == 0
    graph, _ = recorder.record(lambda: x.mul_(3))
    graph.replay()
    assert x.tolist() == [3, 3, 3]
    graph, _ = record(run, host_reads=True)
    x.fill_(-10)
    graph.replay()
    assert x.tolist() == [-8, -8, -8]  # the branch of the capture


@triton.jit
def _add_kernel(x_ptr, out_ptr, amount, BLOCK: tl.constexpr):  # pyright: ignore[reportInvalidTypeForm]
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + amount)


def test_triton_launches_are_recorded_with_their_host_values():
    x, amount = torch.zeros(4), [3]
    outs = []

    def run():
        outs.append(torch.empty_like(x))
        _add_kernel[(1,)](x, outs[-1], amount[0], BLOCK=4)  # pyright: ignore[reportArgumentType]

    graph, _ = record(run)
    assert "_add_kernel" in graph.names
    amount[0] = 50
    x.fill_(1)
    graph.replay()
    assert outs[-1].tolist() == [4] * 4


@pytest.mark.parametrize("whole", [True, False])
def test_attention_whole_or_inside(make_batch, whole):
    """TORCH reads lengths on the host: recorded inside they are frozen, as in a CUDA graph."""
    batch = make_batch([1, 1], [5, 7])
    outs = []

    def run():
        outs.append(attn_ops.attention(batch.q, batch.kv_cache, batch.meta, 0.3))

    graph, _ = record(run, host_reads=True, **({} if whole else {"whole": ()}))
    assert ("attn_ops::attention" in graph.names) == whole
    graph.replay()
    first = outs[-1].clone()
    assert torch.equal(first, attn_ops.attention(batch.q, batch.kv_cache, batch.meta, 0.3))
    batch.common.seq_lens.sub_(1)
    batch.common.seq_lens_cpu.copy_(batch.common.seq_lens)
    graph.replay()
    wanted = attn_ops.attention(batch.q, batch.kv_cache, batch.meta, 0.3)
    assert not torch.equal(first, wanted)
    assert torch.equal(outs[-1], wanted if whole else first)


def test_triton_attention_inside(make_batch):
    batch = make_batch(
        [1, 1], [5, 37], head_size=32, block_size=16, backend=get_backend("TRITON"),
        dtype=torch.float32,
    )  # fmt: skip
    outs = []

    def run():
        outs.append(attn_ops.attention(batch.q, batch.kv_cache, batch.meta, 0.3))

    graph, _ = record(run, whole=())
    assert not [n for n in graph.names if n.startswith("attn_ops")]
    batch.q.mul_(0.5)
    batch.common.seq_lens.sub_(2)
    graph.replay()
    assert torch.equal(outs[-1], attn_ops.attention(batch.q, batch.kv_cache, batch.meta, 0.3))


def test_compiled_code_is_seen():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def fast(x, out):
        compiled = torch.compiler.is_compiling()
        out.copy_(torch.relu(x) + 1 if compiled else x)

    x, out = torch.ones(3), torch.zeros(3)
    graph, _ = record(lambda: fast(x, out))
    assert "aten::relu" in graph.names
    x.fill_(6)
    graph.replay()
    assert out.tolist() == [7, 7, 7]


def test_segments():
    x, segments = torch.ones(2), TapeSegments()
    with segments.recording():
        with segments.segment() as empty:
            pass
        assert empty.is_empty
        with segments.segment() as first:
            x.add_(1)
        x.add_(100)  # between two segments: on neither
        with segments.segment() as second:
            x.mul_(2)
    for tape in (second, first):
        tape.replay()
    assert x.tolist() == [3, 3]
