"""Models, requests and faults for test_graphs.py and test_graph_faults.py, on any device.

On a CPU: TORCH with `debug="eager_replay"`, which goes the same way without graphs.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook

import fx_passes
from attn_ops import Backend, CommonAttentionMetadata, get_backend
from graphs import DecodeSession, Generation

VOCAB = 256
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 40, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0},
    "gemma3n": {"vocab_size_per_layer_input": VOCAB},
    "gemma4": {"vocab_size_per_layer_input": VOCAB, "global_head_dim": 64},
}
"""bfloat16 of this head size, with and without a window and a cap: what test_flashinfer.py needs of
FlashInfer's modules, and no others."""

LATENT: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
}
"""Sizes of DeepSeek's layers, which the libraries' kernels take. A token takes all experts: of
some, near ties fall another way in a call for other lengths."""

SMALL: dict[str, Any] = {
    "max_batch_size": 4,
    "max_tokens": 128,
    "max_tokens_per_step": 32,
    "backend": "TRITON",
    "cudagraph_mode": "FULL_DECODE_ONLY",
}
PROMPTS = [[3], [5, 9], list(range(1, 60)), [1, 2, 3, 4], [7] * 9, [60, 61]]

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 0},  # none of generation_config's filters
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
]


def wide(make_model, family="llama", *, device="cuda", **overrides):
    """A model whose layers one kernel of every backend takes; attention far from one-hot."""
    options = {"dtype": torch.bfloat16} | SIZES | FAMILIES.get(family, {}) | overrides
    model = make_model(family, **options)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.08)
    return model.to(device)


def compiled(model) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)


def num_compiled() -> int:
    """Graphs that Dynamo made so far, in whatever call."""
    return counters["stats"]["unique_graphs"]


def tokens(results: Sequence[Generation]) -> list[list[int]]:
    return [result.token_ids for result in results]


def small(model, **options) -> DecodeSession:
    return DecodeSession(model, **(SMALL | options))


def uncaptured(model, prompts: Sequence[list[int]] = PROMPTS, new: int = 16) -> list[list[int]]:
    """Tokens of steps that are called."""
    return tokens(small(model, cudagraph_mode="NONE").generate(prompts, new))


def available(name: str) -> str:
    """`name`, or the test is skipped."""
    if why := get_backend(name).unavailable():
        pytest.skip(why)
    return name


# -- requests --------------------------------------------------------------------------------------


class Visitors:
    """Requests that arrive, are discarded and finish, at random between any two steps.

    Args:
        session: has no requests yet.
        seed: of all choices.
        max_prompt, max_new: tokens of a request at most.
        max_live: requests at a time, waiting ones too.
        arrival: probability that one arrives before a step.
        kinds: keywords of their sampling, each as often.
    """

    def __init__(
        self,
        session: DecodeSession,
        seed: int = 0,
        *,
        max_prompt: int = 100,
        max_new: int = 40,
        max_live: int = 12,
        arrival: float = 0.4,
        kinds: Sequence[dict[str, Any]] = KINDS,
    ) -> None:
        self.session, self.kinds = session, kinds
        self.max_prompt, self.max_new = max_prompt, max_new
        self.max_live, self.arrival = max_live, arrival
        self.generator = torch.Generator().manual_seed(seed)
        self.live: dict[int, int] = {}  # new tokens that were asked for, by id
        self.num_finished = self.num_discarded = self.num_tokens = 0

    def below(self, n: int) -> int:
        return int(torch.randint(0, n, (), generator=self.generator))

    def happens(self, probability: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < probability

    def arrive(self) -> None:
        length, new = 1 + self.below(self.max_prompt), 1 + self.below(self.max_new)
        prompt = torch.randint(1, VOCAB, (length,), generator=self.generator).tolist()
        kind = self.kinds[self.below(len(self.kinds))]
        self.live[self.session.add(prompt, new, **kind)] = new

    def leave(self) -> None:
        request = list(self.live)[self.below(len(self.live))]
        self.session.discard(request)
        del self.live[request]
        self.num_discarded += 1

    def step(self, *, closed: bool = False) -> None:
        """Come, go, one step, and take what finished. `closed`: nobody comes or is discarded."""
        if not closed:
            empty = not self.session.num_unfinished
            if empty or (len(self.live) < self.max_live and self.happens(self.arrival)):
                self.arrive()
            if self.happens(0.02):
                self.leave()
        self.session.step()
        for request, new in list(self.live.items()):
            result = self.session.result(request)
            if result is not None:
                assert len(result.token_ids) == new
                assert result.finish_reason == "length"
                self.num_tokens += new
                self.num_finished += 1
                self.session.discard(request)
                del self.live[request]

    def drain(self) -> None:
        while self.session.num_unfinished:
            self.step(closed=True)
        assert not self.live
        cache = self.session.cache
        assert cache.num_free_blocks == cache.num_blocks - 1


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request that comes when so many steps were made, or when nothing else is left."""

    after: int
    prompt: list[int]
    new: int
    sampling: dict[str, Any]


def arrivals(num: int, seed: int = 0, kinds: Sequence[dict[str, Any]] = KINDS) -> list[Arrival]:
    generator = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(0, n, (), generator=generator))

    found, after = [], 0
    for i in range(num):
        prompt = torch.randint(1, VOCAB, (1 + below(60),), generator=generator).tolist()
        kind = kinds[i % len(kinds)]
        found.append(Arrival(after, prompt, 8 + below(24), kind | {"seed": i} if kind else kind))
        after += below(4)
    return found


def play(session: DecodeSession, script: Sequence[Arrival]) -> list[list[int]]:
    """Tokens of every request."""
    pending, ids, num_steps = list(script), [], 0
    while pending or session.num_unfinished:
        while pending and (pending[0].after <= num_steps or not session.num_unfinished):
            arrival = pending.pop(0)
            ids.append(session.add(arrival.prompt, arrival.new, **arrival.sampling))
        session.step()
        num_steps += 1
    return tokens([result for i in ids if (result := session.result(i)) is not None])


# -- what moves under a captured step --------------------------------------------------------------

Undo = Callable[[], None]


def moved_cache(session: DecodeSession) -> Undo:
    caches, old = session.cache.tensors, session.cache.tensors[1]
    caches[1] = old.clone()
    return lambda: caches.__setitem__(1, old)


def missing_cache(session: DecodeSession) -> Undo:
    caches = session.cache.tensors
    old = caches.pop()
    return lambda: caches.append(old)


def moved_step_buffer(session: DecodeSession) -> Undo:
    assert session.graphs is not None
    devices = [captured.tensors.device for captured in session.graphs]
    olds = [device["seq_lens"] for device in devices]
    for device, old in zip(devices, olds, strict=True):
        device["seq_lens"] = old.clone()

    def undo() -> None:
        for device, old in zip(devices, olds, strict=True):
            device["seq_lens"] = old

    return undo


def replaced_weight(session: DecodeSession) -> Undo:
    layer = session.original.model.layers[1].mlp.down_proj
    old = layer.weight
    layer.weight = torch.nn.Parameter(old.clone(), requires_grad=False)
    return lambda: setattr(layer, "weight", old)


def moved_weight(session: DecodeSession) -> Undo:
    weight = session.original.model.embed_tokens.weight
    old = weight.data
    weight.data = old.clone()
    return lambda: setattr(weight, "data", old)


def moved_buffer(session: DecodeSession) -> Undo:
    rotary = session.original.model.rotary_emb
    old = rotary.inv_freq
    rotary.inv_freq = old.clone()
    return lambda: setattr(rotary, "inv_freq", old)


MOVES: dict[str, Callable[[DecodeSession], Undo]] = {
    r"kv_caches\[1\]": moved_cache,
    r"kv_caches\[\d\]": missing_cache,
    r"step\[seq_lens\]": moved_step_buffer,
    r"weights\.model\.layers\.1\.mlp\.down_proj\.weight": replaced_weight,
    r"weights\.model\.embed_tokens\.weight": moved_weight,
    r"weights\.model\.rotary_emb\.inv_freq": moved_buffer,
}
"""By what the refusal says."""


def free_cache(session: DecodeSession) -> None:
    """The allocator has its memory, and may give it to anybody."""
    session.cache.tensors[0].untyped_storage().resize_(0)


# -- a backend that is wrong -----------------------------------------------------------------------


def frozen_backend(base: Backend, name: str) -> Backend:
    """Like `base`, but a captured step attends to no more keys than the batch before it had."""

    class FrozenBuilder(base.builder):
        longest = 1  # of the last batch that came with its lengths
        frozen: int | None = None

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            if common_attn_metadata.seq_lens_cpu is not None:
                self.longest = max(1, common_attn_metadata.max_seq_len)
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

        def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
            if self.frozen is None:
                self.frozen = self.longest
            short = common_attn_metadata.seq_lens.clamp(max=self.frozen)
            return super().build_for_cudagraph_capture(common_attn_metadata.replace(seq_lens=short))

    return dataclasses.replace(base, name=name, builder=FrozenBuilder)


# -- what a capture refuses ------------------------------------------------------------------------


def reads_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 + 0.0 * x.sum().item())


def finds_elements(x: torch.Tensor) -> torch.Tensor:
    return x + 0.0 * torch.nonzero(x).shape[0]


@dataclasses.dataclass
class Fault:
    """Something in a step that no graph can hold, at a place of its own; it changes no result."""

    how: Callable[[torch.Tensor], torch.Tensor]
    operator: str
    failure: str

    def install(self, monkeypatch, session: DecodeSession, place: str) -> Undo:
        if place == "sampling":
            import graphs.runner as runner

            argmax = runner.argmax
            monkeypatch.setattr(runner, "argmax", lambda logits: argmax(self.how(logits)))
            return lambda: monkeypatch.setattr(runner, "argmax", argmax)
        layers = session.original.model.layers
        layer = layers[0 if place == "first layer" else -1].mlp
        # For all modules: a hook on the layer would be a change of the model, whose graphs go.
        return register_module_forward_hook(
            lambda module, inputs, out: self.how(out) if module is layer else None
        ).remove


FAULTS = {
    "first layer": Fault(reads_a_value, "aten::_local_scalar_dense", "HOST_SYNC"),
    "last layer": Fault(finds_elements, "aten::nonzero", "UNSUPPORTED"),
    "sampling": Fault(reads_a_value, "aten::_local_scalar_dense", "HOST_SYNC"),
}


# -- memory ----------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Of this process in the machine's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
