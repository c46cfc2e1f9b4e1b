"""Reinforcement learning: samples from a captured session, whose weights a trainer updates.

`python examples/rollouts.py`, on a CPU or a GPU.

Each round draws samples of every prompt, rewards them, and makes the rewarded ones likelier. The
trainer is a model of its own with gradients; `update_weights` copies its weights into those of the
session, in place. So nothing is compiled or captured again: graphs read the new weights in the next
step. With `share_prefixes` the samples of a prompt compute it once; what was computed with old
weights is forgotten.

A token's score must be the log-probability that it was drawn with: else the trainer corrects for a
policy that nobody followed. On a Hopper GPU `batch_invariant` makes the difference 0, bit by bit.
"""

import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import graphs
from attn_ops.integrations import transformers as integration

VOCAB_SIZE, NUM_SAMPLES, NEW_TOKENS, NUM_ROUNDS = 64, 16, 12, 8
PROMPTS = [[1, *range(10, 30)], [1, *range(30, 55)]]


def reward(tokens: list[int]) -> float:
    """The share of even tokens: a model that learns writes more of them."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def make_model(attention: str, device: str) -> torch.nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device)


def loss_of(
    trainer: torch.nn.Module, prompt: list[int], samples: list[list[int]], device: str
) -> torch.Tensor:
    """REINFORCE: the log-probability of each sample, by how much better it is than the others."""
    tokens = torch.tensor([prompt + sample for sample in samples], device=device)
    rewards = torch.tensor([reward(sample) for sample in samples], device=device)
    logits = trainer(tokens[:, :-1]).logits[:, len(prompt) - 1 :].float()
    drawn = tokens[:, len(prompt) :, None]
    log_probabilities = logits.log_softmax(-1).gather(-1, drawn).sum((1, 2))
    return -((rewards - rewards.mean()) * log_probabilities).mean()


def largest_difference(session: graphs.DecodeSession, results: list[graphs.Generation]) -> float:
    """Of a token's score and the log-probability it was drawn with."""
    prompts = [prompt for prompt in PROMPTS for _ in range(NUM_SAMPLES)]
    scores = session.score(prompts, [result.token_ids for result in results])
    drawn = [
        entry[token].logprob
        for result in results
        for token, entry in zip(result.token_ids, result.logprobs or (), strict=True)
    ]
    scored = [value for score in scores for value in score.logprobs]
    return max(abs(a - b) for a, b in zip(scored, drawn, strict=True))


def main() -> None:
    integration.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = make_model("sdpa", device)
    dtype = torch.bfloat16 if has_hopper() else torch.float32
    model = make_model("attn_ops", device).eval().requires_grad_(False).to(dtype)
    session = graphs.DecodeSession(
        torch.compile(model, backend="attn_ops", fullgraph=True), max_tokens=64,
        max_batch_size=len(PROMPTS) * NUM_SAMPLES, share_prefixes=True,
        batch_invariant=has_hopper(),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for number in range(NUM_ROUNDS):
        begin = time.perf_counter()
        results = session.generate(
            PROMPTS, NEW_TOKENS, n=NUM_SAMPLES, temperature=1.0, seed=number, eos=(), logprobs=0
        )
        seconds = time.perf_counter() - begin
        difference = largest_difference(session, results)
        samples = [result.token_ids for result in results]
        groups = [samples[i * NUM_SAMPLES : (i + 1) * NUM_SAMPLES] for i in range(len(PROMPTS))]
        losses = [loss_of(trainer, *pair, device) for pair in zip(PROMPTS, groups, strict=True)]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        session.update_weights({k: v.to(dtype) for k, v in trainer.state_dict().items()})
        mean = sum(map(reward, samples)) / len(samples)
        print(f"round {number}: mean reward {mean:.3f}, {len(samples)} samples in {seconds:.2f} s, "
              f"score minus drawn at most {difference:.1e}")  # fmt: skip
    counters = session.counters
    print(f"{counters.num_graphs} graph, {counters.num_recompiles} recompilations; "
          f"{session.report().prefixes}")  # fmt: skip


if __name__ == "__main__":
    main()
