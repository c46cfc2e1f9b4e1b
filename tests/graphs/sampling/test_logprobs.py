"""Log-probabilities: the reference against float64, the kernel against the reference.

The kernel runs on a GPU, and interpreted on a machine without one.
"""

import pytest
import torch

from graphs.sampling.logprobs import LogProbs, log_probs, reference_log_probs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernel_log_probs(logits, tokens, k):
    pytest.importorskip("triton")
    from graphs.sampling.triton.logprobs import launch_log_probs

    found = launch_log_probs(logits.to(DEVICE), tokens.to(DEVICE), k)
    return LogProbs(*(x.cpu() for x in found))


@pytest.mark.parametrize("compute", [reference_log_probs, kernel_log_probs])
@pytest.mark.parametrize(
    ("vocab_size", "k"),
    [
        (1, 1),
        (40, 0),
        (40, 5),
        pytest.param(2100, 20, marks=pytest.mark.slow),
        pytest.param(2100, 64, marks=pytest.mark.long),
    ],
)
def test_equal_to_float64(compute, vocab_size, k):
    logits_RV = torch.randn(5, vocab_size) * 4
    logits_RV[1] = logits_RV[1].round()  # many are equal
    tokens_R = torch.randint(0, vocab_size, (5,))
    found = compute(logits_RV, tokens_R, k)
    wanted_RV = logits_RV.double().log_softmax(-1)
    ids_RK = found.ids.long()
    torch.testing.assert_close(
        found.values.double(), wanted_RV.gather(1, ids_RK), atol=1e-5, rtol=0
    )
    assert (ids_RK[:, 0] == tokens_R).all()
    ranked_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices
    assert (ids_RK[:, 1:] == ranked_RV[:, :k]).all()
    above_RV = logits_RV > logits_RV.gather(1, tokens_R.unsqueeze(1))
    assert (found.ranks == 1 + above_RV.sum(1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_infinities_and_nan(dtype):
    logits_RV = torch.randn(3, 2100).to(dtype)
    logits_RV[:, 7], logits_RV[1, 9] = -torch.inf, torch.nan
    logits_RV[2], logits_RV[2, 2099] = -torch.inf, 1.0
    tokens_R = torch.tensor([7, 9, 2099])
    found, wanted = kernel_log_probs(logits_RV, tokens_R, 3), log_probs(logits_RV, tokens_R, 3)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=0)


def test_a_number_out_of_range():
    with pytest.raises(ValueError, match="logprobs must be from 0 to 64, got 65"):
        log_probs(torch.zeros(1, 100), torch.zeros(1, dtype=torch.int64), 65)
