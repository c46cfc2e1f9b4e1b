"""top-k, top-p and min-p: which tokens a row may draw.

In this order, each among what the one before left (that of Transformers). Every filter keeps the
tokens whose logit is at least some threshold, so that equally likely tokens stay or go together.
Filtered tokens become -inf and the others stay the same number: the race that follows does not see
whether a row was filtered.

Sums decide top-p, and the order of a sum of floats may depend on the size of the batch. Weights
exp(logit - largest) are therefore added as integers, of 2**-40. R rows, V vocabulary.
"""

import functools
from collections.abc import Mapping
from types import ModuleType

import torch

from graphs.sampling.race import LEAST_TEMPERATURE

_INF = torch.inf
_UNIT = 2.0**40
"""Integers that make a weight of 1; 2**22 weights of 1 still fit."""


def filtered(logits: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Logits [R, V] in float32, -inf where top_k, top_p and min_p forbid the token.

    FlashInfer's kernels on CUDA where they can be had (`filter_kernels`), else a sort.
    """
    logits_RV = logits.float().nan_to_num(nan=-_INF, posinf=_INF, neginf=-_INF)
    temperature_R1 = fields["temperature"].unsqueeze(1)
    scaled_RV = logits_RV / temperature_R1.clamp(min=LEAST_TEMPERATURE)
    keep = reference_keep
    if logits.device.type == "cuda" and filter_kernels(logits.device)[0] == "flashinfer":
        keep = flashinfer_keep
    kept_RV = keep(scaled_RV, fields["top_k"], fields["top_p"], fields["min_p"])
    return logits_RV.masked_fill(~(kept_RV | (temperature_R1 <= 0)), -_INF)


def reference_keep(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[R, V] bool: which tokens stay, of logits over temperature [R, V] float32; by a sort."""
    largest_R1 = scaled.amax(dim=-1, keepdim=True)
    ranked_RV = scaled.sort(dim=-1, descending=True).values
    k_R1 = _at_most(top_k, scaled.shape[1]).long().unsqueeze(1)
    by_k_R1 = ranked_RV.gather(1, k_R1 - 1)
    mass_RV = _mass(weights(ranked_RV, largest_R1).where(ranked_RV >= by_k_R1, 0.0))
    up_to_RV = mass_RV.cumsum(dim=-1)
    wanted_R1 = _wanted(top_p.unsqueeze(1), up_to_RV[:, -1:])
    in_p_RV = up_to_RV - mass_RV < wanted_R1
    by_p_R1 = ranked_RV.where(in_p_RV, _INF).amin(dim=-1, keepdim=True)
    by_p_R1 = by_p_R1.where(top_p.unsqueeze(1) < 1, -_INF)
    kept_RV = scaled >= torch.maximum(by_k_R1, by_p_R1)
    return kept_RV & (weights(scaled, largest_R1) >= min_p.unsqueeze(1))


def flashinfer_keep(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The same with kernels; a token on the very edge of top_p may be judged otherwise.

    top_k with our own: FlashInfer 0.6's `top_k_mask_logits` keeps other tokens than the sort for
    some shapes (90 rows of 50,257), and what `top_k_renorm_probs` sums depends on the order of
    atomics (flashinfer#5034). top_p with FlashInfer's `top_p_renorm_probs`, of which only is taken
    which tokens stay; it sums a row in one thread block.
    """
    from graphs.triton.top_k import kth_largest

    sampling = _flashinfer(scaled.device)
    assert isinstance(sampling, ModuleType), sampling
    largest_R1 = scaled.amax(dim=-1, keepdim=True)
    by_k_R1 = kth_largest(scaled, _at_most(top_k, scaled.shape[1])).unsqueeze(1)
    masked_RV = scaled.where(scaled >= by_k_R1, -_INF)
    weight_RV = weights(masked_RV, largest_R1).where(masked_RV > -_INF, 0.0)
    total_R1 = _mass(weight_RV).sum(dim=-1, keepdim=True) / _UNIT
    probs_RV = weight_RV / total_R1.float().clamp(min=1.0)
    in_p_RV = (sampling.top_p_renorm_probs(probs_RV, top_p) > 0) | (top_p.unsqueeze(1) >= 1)
    return in_p_RV & (masked_RV > -_INF) & (weight_RV >= min_p.unsqueeze(1))


def weights(scaled: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """exp(scaled - largest), 1 where both are the same infinity."""
    return (scaled - largest).nan_to_num(nan=0.0, posinf=_INF, neginf=-_INF).exp()


def filter_kernels(device: torch.device) -> tuple[str, str]:
    """Which kernels filter on `device`, "flashinfer" or "torch", and why.

    The first call on a CUDA device imports FlashInfer, which compiles its sampling kernels unless
    `flashinfer-jit-cache` holds them, and runs them once, for their workspaces must not come from
    a graph's pool.

    Raises:
        RuntimeError: this is the first call and a graph is being captured.
    """
    if device.type != "cuda":
        return "torch", f"FlashInfer's kernels need CUDA, the device is {device.type}"
    found = _flashinfer(device)
    if isinstance(found, str):
        return "torch", found
    return "flashinfer", "FlashInfer is installed"


@functools.cache
def _flashinfer(device: torch.device) -> ModuleType | str:
    """`flashinfer.sampling`, tried on `device`; or why it is not used."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "FlashInfer must be loaded before a graph is captured: call "
            "graphs.sampling.filter_kernels(device) first"
        )
    from attn_ops.backends.flashinfer import unavailable

    why = unavailable()
    if why is not None:
        return why
    try:
        import flashinfer.sampling as sampling  # pyright: ignore[reportMissingImports]

        probs = torch.full((1, 64), 1 / 64, device=device)
        sampling.top_p_renorm_probs(probs, torch.full((1,), 0.5, device=device))
        torch.cuda.synchronize(device)
    except Exception as error:  # no compiler, a broken installation: anything may come
        return f"FlashInfer's sampling kernels do not work: {type(error).__name__}: {error}"
    from graphs.triton.top_k import kth_largest

    kth_largest(probs, torch.ones(1, dtype=torch.int32, device=device))
    return sampling


def _at_most(top_k: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How many tokens stay, all of them for 0; int32."""
    return torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)


def _mass(weight: torch.Tensor) -> torch.Tensor:
    return (weight * _UNIT).to(torch.int64)


def _wanted(top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """The least mass that is a part of `top_p` of the total; at least 1, also for a tiny one."""
    return (top_p.double() * total.double()).ceil().to(torch.int64)
