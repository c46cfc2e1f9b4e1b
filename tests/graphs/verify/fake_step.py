"""A decode step without a model, for tests of the verifier, and what a wrong graph may do to it.

S requests, V vocabulary, P blocks, B block size, K kv heads, H head size.
"""

import math

import pytest
import torch

from attn_ops.ops.write_kv import stored
from graphs.capture.verifier import VerificationError, Verifier
from graphs.modes import BatchDescriptor

S, V, P, B, K, H = 4, 32, 9, 4, 2, 8
LAYERS = 3
KEY = BatchDescriptor(S, S, uniform=True)
SLOTS = [2 * B + 1, 5 * B + 3, -1, 7 * B]  # the third request is padding


class FakeStep:
    """A decode step with all its state in one block, as a session has it.

    `run` is the call; what stands for a replay is `run` with something done behind it.
    """

    def __init__(self, dtype=torch.float32, layout="NHD", kv_cache_dtype="auto"):
        self.dtype, self.kv_cache_dtype = dtype, kv_cache_dtype
        generator = torch.Generator().manual_seed(0)
        self.state = torch.zeros(S * 8 * 3 + 8, dtype=torch.uint8)
        names = ("input_ids", "slot_mapping", "tokens")
        self.views = {
            name: self.state[i * S * 8 : (i + 1) * S * 8].view(torch.int64)
            for i, name in enumerate(names)
        }
        self.step = self.state[-8:].view(torch.int64)
        self.views["input_ids"].copy_(torch.tensor([3, 1, 0, 7]))
        self.views["slot_mapping"].copy_(torch.tensor(SLOTS))
        order = (K, B) if layout == "HND" else (B, K)
        shape = (P, B, K * H) if layout == "latent" else (P, 2, *order, H)
        self.caches = []
        for _ in range(LAYERS):
            cache = torch.randn(shape, generator=generator).to(dtype)
            if kv_cache_dtype != "auto":
                cache = stored(cache.float(), kv_cache_dtype, None)
            else:
                cache[0] = math.nan  # no one may read the null block
            self.caches.append(cache.transpose(2, 3) if layout == "HND" else cache)
        self.embedding = torch.randn(V, K, H, generator=generator).to(dtype)
        self.head = torch.randn(K * H, V, generator=generator).to(dtype)
        self.logits = torch.zeros(S, V, dtype=dtype)
        self.num_runs = 0

    def run(self, noise: float = 0.0) -> None:
        self.num_runs += 1
        slots, x = self.views["slot_mapping"].clone(), self.embedding[self.views["input_ids"]]
        owned = slots >= 0
        block, offset = slots.clamp(min=0) // B, slots.clamp(min=0) % B
        for i, cache in enumerate(self.caches):
            k = x * (i + 1) * (1 + noise)
            if self.kv_cache_dtype != "auto":
                k = stored(k.float(), self.kv_cache_dtype, None)
            if cache.dim() == 3:
                cache[block, offset] = k.flatten(1)
                continue
            cache[block, 0, offset] = k
            cache[block, 1, offset] = k
        self.logits = x.flatten(1) @ self.head * (1 + noise)
        self.views["tokens"].copy_(self.logits.argmax(1))
        self.step.add_(1)
        self.views["input_ids"].copy_(torch.where(owned, self.views["tokens"], 0))
        self.views["slot_mapping"].copy_(torch.where(owned, slots + 1, -1))

    def outputs(self) -> dict[str, torch.Tensor]:
        used = torch.tensor([0, 1, 3])
        names = ("tokens", "input_ids", "slot_mapping")
        return {"logits": self.logits[used], **{n: self.views[n][used] for n in names}}

    def snapshot(self) -> list[torch.Tensor]:
        """State and caches without the null block, as bytes."""
        return [t.clone().contiguous().view(torch.uint8) for t in (self.state, *self.owned())]

    def owned(self) -> list[torch.Tensor]:
        return [cache[1:] for cache in self.caches]

    def check(self, verifier: Verifier, replay, **more) -> None:
        slots = self.views["slot_mapping"]  # a view of the state, as a session may hand in
        verifier.check(KEY, self.state, self.caches, slots, replay, self.run, self.outputs, **more)

    def wrong(self, verifier: Verifier, replay, match="", **more) -> VerificationError:
        """What is said of a replay that is found to be wrong."""
        with pytest.raises(VerificationError, match=match) as caught:
            self.check(verifier, replay, **more)
        return caught.value

    def damaged(self, *damages):
        """A replay with something done behind it."""

        def replay():
            self.run()
            for damage in damages:
                damage(self)

        return replay


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


# -- what a wrong replay does ----------------------------------------------------------------------


def one_token(step):
    step.views["tokens"][1] = (step.views["tokens"][1] + 1) % V


def next_slot(step):
    step.views["slot_mapping"][3] += 1


def one_key(step):
    step.caches[1][5, 0, 3, 1, 2] += 0.5


def one_value(step):
    step.caches[2][7, 1, 0, 0, 7] += 0.5


def nan_key(step):
    step.caches[0][2, 0, 1, 0, 0] = math.nan


def one_logit(step):
    step.logits[3, 5] -= 1.0


def infinite_logit(step):
    step.logits[0, 9] = -math.inf


def tied_step(gap: float) -> FakeStep:
    """A step whose first request's two largest logits lie `gap` apart."""
    step = FakeStep()
    run = step.run

    def tied():
        run()
        best = step.logits[0].max() + 1
        step.logits[0, 4], step.logits[0, 6] = best, best - gap
        step.views["tokens"][0] = step.views["input_ids"][0] = 4

    step.run = tied
    return step


def takes_the_second(step):
    step.run()
    step.views["tokens"][0] = step.views["input_ids"][0] = 6
