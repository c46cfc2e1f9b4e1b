"""Reinforcement learning: samples from a captured session, weights that a trainer writes in place.

`python examples/rollouts.py`, on a CPU or a GPU.

Each round draws samples of every prompt, rewards them, and makes the rewarded ones likelier. The
trainer is a model of its own with gradients; its weights are copied into those of the session, in
place. So nothing is compiled or captured again: graphs read the new weights in the next step. With
`share_prefixes` the samples of a prompt compute it once; what was computed with old weights is
forgotten.
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


@torch.no_grad()
def copy_weights(trainer: torch.nn.Module, model: torch.nn.Module) -> None:
    """In place: a graph reads weights where they were when it was captured."""
    for mine, theirs in zip(model.parameters(), trainer.parameters(), strict=True):
        mine.copy_(theirs)


def main() -> None:
    integration.register()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = make_model("sdpa", device)
    model = make_model("attn_ops", device).eval().requires_grad_(False)
    session = graphs.DecodeSession(
        torch.compile(model, backend="attn_ops"), max_batch_size=len(PROMPTS) * NUM_SAMPLES,
        max_tokens=64, share_prefixes=True,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    for number in range(NUM_ROUNDS):
        begin = time.perf_counter()
        results = session.generate(
            PROMPTS, NEW_TOKENS, n=NUM_SAMPLES, temperature=1.0, seed=number, eos=()
        )
        seconds = time.perf_counter() - begin
        samples = [result.token_ids for result in results]
        groups = [samples[i * NUM_SAMPLES : (i + 1) * NUM_SAMPLES] for i in range(len(PROMPTS))]
        losses = [loss_of(trainer, *pair, device) for pair in zip(PROMPTS, groups, strict=True)]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        copy_weights(trainer, model)
        mean = sum(map(reward, samples)) / len(samples)
        print(f"round {number}: mean reward {mean:.3f}, {len(samples)} samples in {seconds:.2f} s")
    counters = session.counters
    print(f"{counters.num_graphs} graph, {counters.num_recompiles} recompilations; "
          f"{session.report().prefixes}")  # fmt: skip


if __name__ == "__main__":
    main()
