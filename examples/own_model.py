"""A model of your own: compiled, and its decode step captured: `python examples/own_model.py`.

It needs nothing of Transformers. T tokens, N query heads, K kv heads, H head size, S requests.
"""

import torch
from torch import nn

from attn_ops import (
    Attention,
    AttentionMetadata,
    CommonAttentionMetadata,
    PagedKVCache,
    advance_step,
    dynamic_batch,
    select_backend,
)

VOCAB, WIDTH, N, K, H, BLOCK = 256, 128, 4, 2, 32, 16
MAX_TOKENS = 128  # of a request


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (N + 2 * K) * H)
        self.attention = Attention(N, K, H)
        self.out = nn.Linear(N * H, WIDTH)

    def forward(self, x, kv_cache, meta: AttentionMetadata, slots):
        qkv = self.qkv(self.norm(x)).view(x.shape[0], -1, H)
        q, k, v = qkv.split([N, K, K], dim=1)
        return x + self.out(self.attention(q, k, v, kv_cache, meta, slots).flatten(1))


class Model(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(MAX_TOKENS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, token_ids, position_ids, slots, meta: AttentionMetadata, kv_caches):
        """token_ids, position_ids, slots [T] int64 -> logits [T, VOCAB]."""
        x = self.tokens(token_ids) + self.positions(position_ids)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, kv_cache, meta, slots)
        return self.head(x)


def generate(prompts: list[list[int]], num_tokens: int, device: str, compiled: bool = True):
    """Greedy tokens of each prompt, [S][num_tokens]."""
    torch.manual_seed(0)
    model = Model().to(device).eval()
    specs = [layer.attention.spec(torch.float32) for layer in model.layers]
    backend = select_backend(specs, block_size=BLOCK, device=device).backend
    builder = backend.builder(backend, specs, BLOCK, device)
    cache = PagedKVCache(specs, num_tokens=1024, block_size=BLOCK, device=device)
    lengths = [len(prompt) for prompt in prompts]
    for request, length in enumerate(lengths):
        cache.reserve(request, length + num_tokens)
    table = cache.block_table(range(len(prompts)))
    run = torch.compile(model, backend="attn_ops", fullgraph=True) if compiled else model

    # Prefill: all prompts in one row of tokens.
    common = CommonAttentionMetadata.from_lengths(lengths, lengths, table, BLOCK, device)
    token_ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    slots = common.slot_mapping
    with dynamic_batch(token_ids, positions, slots):  # its length changes from step to step
        logits = run(token_ids, positions, slots, builder.build(0, common), cache.tensors)
    last = common.query_start_loc[1:].long() - 1
    drawn = [logits[last].argmax(-1)]

    # Decode: the inputs of a step stay where they are, so that a graph can be replayed on them.
    common = CommonAttentionMetadata.from_lengths(
        [1] * len(prompts), [n + 1 for n in lengths], table, BLOCK, device
    )
    token_ids, positions = drawn[0].clone(), common.seq_lens.long() - 1
    slots, seq_lens = common.slot_mapping, common.seq_lens
    # Lengths change on the device alone: the host knows a bound.
    bound = common.replace(max_seq_len=MAX_TOKENS, seq_lens_cpu=None, num_computed_tokens_cpu=None)

    def step() -> torch.Tensor:
        meta = builder.build_for_cudagraph_capture(bound)
        next_ids = run(token_ids, positions, slots, meta, cache.tensors).argmax(-1)
        advance_step(
            next_ids, token_ids, positions, seq_lens, slots, common.block_table_tensor, BLOCK
        )
        return next_ids

    step = captured(step, (token_ids, positions, seq_lens, slots)) if device == "cuda" else step
    drawn += [step().clone() for _ in range(num_tokens - 1)]
    return torch.stack(drawn, 1).tolist()


def captured(step, state):
    """A function that replays one CUDA graph of `step`; `state` is what a step changes."""
    before = [tensor.clone() for tensor in state]

    def restore() -> None:
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles, and loads the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    restore()
    with torch.cuda.graph(graph):
        result = step()
    restore()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.inference_mode(False), torch.no_grad():
        for tokens in generate([[1, 2, 3, 4, 5], [6], [7, 8]], 16, device):
            print(tokens)


if __name__ == "__main__":
    main()
