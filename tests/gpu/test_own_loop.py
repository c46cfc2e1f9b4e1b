"""A loop and a CUDA graph of one's own (examples/own_loop.py), with every backend that captures.

S requests, M blocks a request may own.
"""

import pytest
import torch
from torch._dynamo.utils import counters

import fx_passes
from attn_ops import PagedKVCache, backend_names, get_backend
from attn_ops.integrations.transformers import attention_specs
from attn_ops.metadata.features import AttentionCGSupport
from examples.own_loop import BLOCK, DecodeStep, generate
from tests.gpu.test_session import VOCAB, tiny_llama

pytestmark = pytest.mark.gpu

S, LONGEST, STEPS = 5, 300, 200


def captured_backends() -> list[str]:
    """Backends that declare captured steps, for layers without latent attention or layouts."""
    names = [n for n in backend_names() if "MLA" not in n and n != "BLOCKSPARSE"]
    return [n for n in names if get_backend(n).support.cudagraph != AttentionCGSupport.NEVER]


def random_inputs(cache, generator):
    """Tokens, lengths and block tables; every second request is short, one has ended."""
    lengths = torch.randint(1, LONGEST + 1, (S,), generator=generator)
    lengths[1::2] = torch.randint(1, BLOCK + 2, (S // 2,), generator=generator)
    width = -(-LONGEST // BLOCK)
    table = torch.randperm(cache.num_blocks - 1, generator=generator)[: S * width].int() + 1
    table = table.view(S, width)
    lengths[-1], table[-1] = 1, 0  # ended: it keeps a row and writes to the null block
    return torch.randint(0, VOCAB, (S,), generator=generator).cuda(), lengths.tolist(), table


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", captured_backends())
@torch.no_grad()
def test_replays_equal_calls(backend, compiled):
    if why := get_backend(backend).unavailable():
        pytest.skip(why)
    torch._dynamo.reset()
    model = tiny_llama(2)
    run = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True) if compiled else model
    specs = attention_specs(model)
    cache = PagedKVCache(specs, num_tokens=2048, block_size=BLOCK, device="cuda")
    chosen = get_backend(backend)
    builder = chosen.builder(chosen, specs, BLOCK, "cuda")
    step, generator = DecodeStep(run, builder, cache, S, LONGEST), torch.Generator().manual_seed(0)
    replay = step.capture(step.write(*random_inputs(cache, generator)))
    for tensor in cache.tensors:
        tensor.normal_()
    graphs = counters["stats"]["unique_graphs"]
    for i in range(STEPS):
        inputs = random_inputs(cache, generator)
        before = [tensor.clone() for tensor in cache.tensors]
        got = replay(*inputs).float().clone()
        written = [tensor.clone() for tensor in cache.tensors]
        for tensor, old in zip(cache.tensors, before, strict=True):
            tensor.copy_(old)
        wanted = step.call(builder.build(0, step.write(*inputs))).float()
        error = ((got - wanted)[:-1].abs().max() / wanted.std()).item()
        assert error < 0.1, (i, inputs[1], error)  # one length misread: more than 1
        for mine, theirs in zip(written, cache.tensors, strict=True):
            torch.testing.assert_close(mine[1:], theirs[1:], atol=0.05, rtol=0.02)
    assert counters["stats"]["unique_graphs"] == graphs


@torch.no_grad()
def test_a_replay_says_what_has_moved():
    model = tiny_llama(2)
    specs = attention_specs(model)
    cache = PagedKVCache(specs, num_tokens=2048, block_size=BLOCK, device="cuda")
    backend = get_backend("TRITON")
    builder = backend.builder(backend, specs, BLOCK, "cuda")
    step, generator = DecodeStep(model, builder, cache, S, LONGEST), torch.Generator()
    replay = step.capture(step.write(*random_inputs(cache, generator)))
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.mul_(2)  # in place: the next replay reads it
    replay(*random_inputs(cache, generator))
    layer.weight = torch.nn.Parameter(layer.weight.clone(), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.up_proj"):
        replay(*random_inputs(cache, generator))


def test_its_tokens_are_those_of_calls():
    model = tiny_llama(2, torch.float32)
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8] * 20]
    wanted = generate(model.cpu(), prompts, 24, "TORCH")
    assert generate(model.cuda(), prompts, 24, "TRITON") == wanted
