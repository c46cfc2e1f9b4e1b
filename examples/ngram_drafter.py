"""Prompt lookup: drafts without a draft model, checked by the model, the tokens those of decoding.

`python examples/ngram_drafter.py`, on a CPU or a GPU.

What a model writes next has often stood in the text before: code, quotations, loops. So the last
few tokens are looked up in what came before, and the tokens that followed there are the draft. One
step runs them all through the model and keeps those that it would have generated anyway.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import graphs
from attn_ops.integrations import transformers as integration

VOCAB_SIZE = 512
NUM_DRAFT_TOKENS = 4
MAX_NEW_TOKENS = 96


class NgramDrafter:
    """Drafts for one request: what followed the latest n-gram that is like the text's last one.

    Args:
        prompt: token ids.
        longest: n at most; a longer match is a better sign, so it comes first.
    """

    def __init__(self, prompt: Iterable[int], longest: int = 4) -> None:
        self.longest = longest
        self.tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # by n-gram: the position after its latest
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        """Take the text's next token."""
        for ngram in self._last():
            self._behind[ngram] = len(self.tokens)
        self.tokens.append(token)

    def draft(self, num_tokens: int) -> list[int]:
        """So many tokens; none if the last one is new.

        Where the text ends, the draft goes on in itself: a loop is drafted round and round.
        """
        begin = next((self._behind[n] for n in self._last() if n in self._behind), None)
        if begin is None:
            return []
        text = self.tokens[begin:]
        while len(text) < num_tokens:
            text += text
        return text[:num_tokens]

    def _last(self) -> list[tuple[int, ...]]:
        """The text's last n-grams, the longest first."""
        longest = min(self.longest, len(self.tokens))
        return [tuple(self.tokens[-n:]) for n in range(longest, 0, -1)]


def generate(
    session: graphs.DecodeSession, prompts: list[list[int]], max_new_tokens: int, num_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """Tokens of all prompts, and of every request in every step, how many tokens it yielded."""
    ids = [session.add(prompt, max_new_tokens) for prompt in prompts]
    drafters = {i: NgramDrafter(prompt) for i, prompt in zip(ids, prompts, strict=True)}
    yields = []
    while session.num_unfinished:
        drafts = {i: d.draft(num_tokens) for i, d in drafters.items() if session.result(i) is None}
        outputs = session.verify_draft(drafts)
        for output in outputs:
            drafters[output.request_id].append(output.token_id)
        yields += Counter(output.request_id for output in outputs).values()
    return [d.tokens[len(p) :] for d, p in zip(drafters.values(), prompts, strict=True)], yields


def random_model() -> torch.nn.Module:
    """Weights so large that what it writes is no single loop, and so small that some of it is.

    In float32: attention over 1 + k rows sums up in another order than over one row, and in
    bfloat16 that may turn two logits that are nearly equal around.
    """
    integration.register()
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attn_ops")
    model.generation_config.eos_token_id = None  # no token of random weights means an end
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    model = random_model()
    lengths, seeded = (12, 40, 7, 23), torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB_SIZE, (n,), generator=seeded).tolist() for n in lengths]
    sizes: dict[str, Any] = {
        "max_batch_size": len(prompts),
        "max_tokens": max(lengths) + MAX_NEW_TOKENS,
    }
    plain = graphs.DecodeSession(model, **sizes)
    drafting = graphs.DecodeSession(model, num_draft_tokens=NUM_DRAFT_TOKENS, **sizes)
    for session in (plain, drafting):
        session.generate(prompts, 2)  # captures graphs, compiles kernels
        session.num_steps.update(captured=0, called=0)

    begin = time.perf_counter()
    wanted = [r.token_ids for r in plain.generate(prompts, MAX_NEW_TOKENS)]
    between = time.perf_counter()
    tokens, yields = generate(drafting, prompts, MAX_NEW_TOKENS, NUM_DRAFT_TOKENS)
    end = time.perf_counter()

    assert tokens == wanted, "drafts must not change a token"
    num_steps = [sum(session.num_steps.values()) for session in (plain, drafting)]
    accepted = sum(yields) / len(yields) - 1
    print(f"{sum(map(len, tokens))} tokens, the same with drafts and without")
    print(f"accepted tokens per step: {accepted:.2f} of {NUM_DRAFT_TOKENS}, and one more")
    print(f"without drafts: {num_steps[0]} steps, {between - begin:.2f} s")
    print(f"with drafts: {num_steps[1]} steps, {end - between:.2f} s")


if __name__ == "__main__":
    main()
