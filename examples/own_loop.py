"""Your own loop and your own CUDA graph over a Transformers model: `python examples/own_loop.py`.

No session. The program decodes with a fixed number of requests and captures the step itself, with
any backend that can be captured. S requests, M blocks a request may own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_ops import CommonAttentionMetadata, PagedKVCache, select_backend
from attn_ops.integrations import transformers as integration
from attn_ops.metadata import AttentionMetadata, MetadataBuffers
from graphs.capture.addresses import AddressBook

BLOCK = 16


class DecodeStep:
    """One greedy token of each of S requests.

    Args:
        model: a Transformers model with `attn_implementation="attn_ops"`, compiled or not.
        builder: of the backend's metadata.
        cache: the paged KV cache.
        num_reqs: S, the same in every step.
        max_tokens: the longest that a request may become. A graph is captured for this bound.
    """

    def __init__(
        self, model: Any, builder: Any, cache: PagedKVCache, num_reqs: int, max_tokens: int
    ) -> None:
        self.model, self.builder, self.cache = model, builder, cache
        self.num_reqs, self.max_tokens = num_reqs, max_tokens
        device = cache.tensors[0].device
        # What a graph reads must stay where it is: every step writes into these tensors.
        self.buffers = MetadataBuffers.allocate(num_reqs, num_reqs, -(-max_tokens // BLOCK), device)
        self.input_ids = torch.zeros(1, num_reqs, dtype=torch.int64, device=device)

    def write(
        self, tokens: torch.Tensor, seq_lens: Sequence[int], block_table: torch.Tensor
    ) -> CommonAttentionMetadata:
        """Write the step's inputs, in front of a call or a replay. Lengths count the new token."""
        self.input_ids[0].copy_(tokens)
        return CommonAttentionMetadata.from_lengths(
            [1] * self.num_reqs, seq_lens, block_table, BLOCK, self.buffers.seq_lens.device,
            out=self.buffers,
        )  # fmt: skip

    def call(self, metadata: AttentionMetadata) -> torch.Tensor:
        """Logits [S, V] of what was written last."""
        output = self.model(
            input_ids=self.input_ids,
            position_ids=self.buffers.positions[None],
            slot_mapping=self.buffers.slot_mapping,
            attn_metadata=metadata,
            kv_caches=self.cache.tensors,
            use_cache=False,
        )
        return output.logits[0]

    def capture(self, common: CommonAttentionMetadata) -> Callable[..., torch.Tensor]:
        """Capture the step; returns a function like `write` that replays it and gives its logits.

        `common` is a batch that `write` gave. A backend that plans on the host (FLASHINFER) makes
        its metadata before the capture and renews it before every replay. All others make it
        inside the graph, from the bounds and the device's lengths.
        """
        bounds = common.replace(
            max_seq_len=self.max_tokens, seq_lens_cpu=None, num_computed_tokens_cpu=None
        )
        prepared = self.builder.prepare_capture(common)

        def run() -> torch.Tensor:
            if prepared is not None:
                return self.call(prepared)
            return self.call(self.builder.build_for_cudagraph_capture(bounds))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()  # compiles, and loads kernels
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = run()
        # A graph reads addresses. The book says which tensor has moved since.
        book = AddressBook.of(
            model=self.model, caches=self.cache.tensors, inputs=self.input_ids, batch=self.buffers
        )

        def replay(*inputs: Any) -> torch.Tensor:
            common = self.write(*inputs)
            if moved := book.moved():
                raise RuntimeError(f"capture again: the graph reads old memory of {moved}")
            if prepared is not None:
                self.builder.prepare_replay(prepared, common)
            graph.replay()
            return logits  # the next replay overwrites it

        return replay


def prefill(
    model: Any, builder: Any, cache: PagedKVCache, prompts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Compute all prompts in one packed row; the first token of each request, [S]."""
    lengths, device = [len(prompt) for prompt in prompts], cache.tensors[0].device
    table = cache.block_table(range(len(prompts)))
    common = CommonAttentionMetadata.from_lengths(lengths, lengths, table, BLOCK, device)
    tokens = torch.tensor([[token for prompt in prompts for token in prompt]], device=device)
    logits = model(
        input_ids=tokens,
        position_ids=common.positions[None],
        slot_mapping=common.slot_mapping,
        attn_metadata=builder.build(0, common),
        kv_caches=cache.tensors,
        use_cache=False,
        logits_to_keep=common.query_start_loc[1:].long() - 1,
    ).logits[0]
    return logits.argmax(-1)


@torch.no_grad()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, backend: str | None = None
) -> list[list[int]]:
    """Greedy tokens of each prompt, [S][num_tokens]; steps are replayed on a GPU."""
    device, longest = next(model.parameters()).device, max(map(len, prompts)) + num_tokens
    integration.check_lengths(model, longest)  # refuses RoPE that depends on the whole batch
    specs = integration.attention_specs(model)
    chosen = select_backend(specs, block_size=BLOCK, device=device, backend=backend).backend
    builder = chosen.builder(chosen, specs, BLOCK, device)
    cache = PagedKVCache(specs, num_tokens=len(prompts) * (longest + BLOCK), device=device)
    for request, prompt in enumerate(prompts):
        cache.reserve(request, len(prompt) + num_tokens)
    table = cache.block_table(range(len(prompts)))

    drawn = [prefill(model, builder, cache, prompts)]
    step = DecodeStep(model, builder, cache, len(prompts), longest)
    lengths = [len(prompt) + 1 for prompt in prompts]
    if device.type == "cuda":
        run = step.capture(step.write(drawn[0], lengths, table))
    else:

        def run(*inputs: Any) -> torch.Tensor:
            return step.call(builder.build(0, step.write(*inputs)))

    for i in range(num_tokens - 1):
        logits = run(drawn[-1], [length + i for length in lengths], table)
        drawn.append(logits.argmax(-1))
    return torch.stack(drawn, 1).tolist()


def main() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    integration.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops").eval()
    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16)
    for tokens in generate(model, [[1, 2, 3, 4, 5], [6], [7, 8]], 16):
        print(tokens)


if __name__ == "__main__":
    main()
