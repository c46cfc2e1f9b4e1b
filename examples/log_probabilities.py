"""What RL needs of a rollout: tokens and their log-probabilities; scored again, they are equal."""

import sys

from graphs import DecodeSession


def rollouts(path: str, prompts: list[str], samples: int = 4) -> float:
    session = DecodeSession.from_pretrained(path, max_batch_size=16, share_prefixes=True)
    drawn = session.generate(prompts, 32, n=samples, temperature=1.0, logprobs=0)
    scores = session.score([r.prompt_token_ids for r in drawn], [r.token_ids for r in drawn])
    return max(abs(r.cumulative_logprob - s.total) for r, s in zip(drawn, scores, strict=True))


if __name__ == "__main__":
    print("largest difference", rollouts(sys.argv[1], ["The sea is", "One and one are"]))
