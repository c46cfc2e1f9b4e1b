"""Penalties on tokens that came before, and the counts they need. R rows, V vocabulary."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class PenaltyState:
    """Which tokens the requests of a step have seen, on the step's device."""

    output_counts: torch.Tensor  # [R, V] int32, contiguous: how often a token is in the output
    in_prompt: torch.Tensor  # [R, V] bool, contiguous: whether it is in the prompt

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> "PenaltyState":
        """The counts of requests that have seen nothing."""
        shape = (num_rows, vocab_size)
        return cls(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
        )

    def view(self, num_rows: int) -> "PenaltyState":
        """The first rows, in the same memory."""
        return PenaltyState(self.output_counts[:num_rows], self.in_prompt[:num_rows])

    def rebuild(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Count again from token lists on the host; cannot be captured.

        Args:
            prompts, outputs: token ids, one list a row.
            rows: the rows of the lists; the others stay as they are. None: the first rows; the
                others become empty.

        Raises:
            ValueError: the numbers of lists and rows differ, or a row or a token is out of range.
        """
        num_rows, vocab_size = self.output_counts.shape
        targets = range(len(prompts)) if rows is None else rows
        if not len(prompts) == len(outputs) == len(targets):
            raise ValueError(
                f"outputs and rows must be as many as prompts, {len(prompts)}, "
                f"got {len(outputs)} and {len(targets)}"
            )
        _check_range("rows", targets, num_rows)
        pairs = [self._pairs(lists, targets, vocab_size) for lists in (prompts, outputs)]
        if rows is None:
            self.in_prompt.zero_()
            self.output_counts.zero_()
        else:
            cleared_S = self._sent(_on_host(rows))
            self.in_prompt.index_fill_(0, cleared_S, False)
            self.output_counts.index_fill_(0, cleared_S, 0)
        prompt_T, output_T = pairs
        self.in_prompt.view(-1).index_fill_(0, prompt_T, True)
        ones_T = torch.ones_like(output_T, dtype=torch.int32)
        self.output_counts.view(-1).index_add_(0, output_T, ones_T)

    def update(self, tokens: torch.Tensor, active: torch.Tensor) -> None:
        """Count the tokens [R] of the rows that are active [R] bool; can be captured."""
        token_R1 = torch.where(active, tokens, 0).to(torch.int64).unsqueeze(1)
        self.output_counts.scatter_add_(1, token_R1, active.to(torch.int32).unsqueeze(1))

    def _pairs(
        self, lists: Sequence[Sequence[int]], rows: Sequence[int], vocab_size: int
    ) -> torch.Tensor:
        """Index [T] of every token of every list in a flat [R, V], on the device."""
        tokens = [token for tokens in lists for token in tokens]
        _check_range("tokens", tokens, vocab_size)
        row_T = _on_host(rows).repeat_interleave(_on_host([len(tokens) for tokens in lists]))
        return self._sent(row_T * vocab_size + _on_host(tokens))

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        device = self.output_counts.device
        return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def _on_host(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")


def penalized(
    logits: torch.Tensor, fields: Mapping[str, torch.Tensor], state: PenaltyState
) -> torch.Tensor:
    """Logits [R, V] in float32 after the penalties of `SamplingParams`.

    Repetition comes first (Keskar et al., arXiv:1909.05858, as Transformers applies it), then
    presence and frequency (OpenAI's API). Neutral penalties change no logit.
    """
    by_row = {name: fields[name].unsqueeze(1) for name in fields}
    count_RV = state.output_counts
    written_RV = count_RV > 0
    logits_RV = logits.float()
    repetition_R1 = by_row["repetition_penalty"]
    lowered_RV = torch.where(logits_RV < 0, logits_RV * repetition_R1, logits_RV / repetition_R1)
    logits_RV = torch.where(written_RV | state.in_prompt, lowered_RV, logits_RV)
    logits_RV = logits_RV - by_row["presence_penalty"] * written_RV
    return logits_RV - by_row["frequency_penalty"] * count_RV


def _check_range(name: str, values: Sequence[int], size: int) -> None:
    if values and not 0 <= min(values) <= max(values) < size:
        bad = next(v for v in values if not 0 <= v < size)
        raise ValueError(f"{name} must be from 0 to {size - 1}, got {bad}")
