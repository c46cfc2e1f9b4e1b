"""The CPU's CUDA graph does what a CUDA graph does, the bad included."""

import pytest
import torch

from tests.graphs.capture.tape import TapeRecorder

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def record(run):
    run()
    return TapeRecorder().record(run)


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
    amount[0] = 50
    x.fill_(1)
    graph.replay()
    assert outs[-1].tolist() == [4] * 4
