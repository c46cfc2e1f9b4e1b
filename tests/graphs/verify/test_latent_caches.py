"""The verifier over caches of latents [P, B, W], which have no keys and values apart."""

import pytest

from graphs.capture.verifier import VerificationError, Verifier
from tests.graphs.verify.fake_step import FakeStep, equal


def wrong(damage, tmp_path, **options) -> VerificationError:
    step = FakeStep(layout="latent")
    verifier = Verifier("always", directory=tmp_path, **options)
    with pytest.raises(VerificationError) as caught:
        step.check(verifier, lambda: (step.run(), damage(step.caches)))
    return caught.value


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_a_right_replay(kv_cache_dtype, tmp_path):
    step = FakeStep(layout="latent", kv_cache_dtype=kv_cache_dtype)
    once = FakeStep(layout="latent", kv_cache_dtype=kv_cache_dtype)
    once.run()
    keywords = {"kv_cache_dtype": kv_cache_dtype, "directory": tmp_path}
    verifier = Verifier("always", strict_writes=True, **keywords)
    step.check(verifier, step.run)
    assert verifier.num_checked == 1
    assert equal(step.snapshot(), once.snapshot())


def test_a_wrong_latent_is_found(tmp_path):
    def one_latent(caches):
        caches[1][5, 3, 10] += 0.5

    error = wrong(one_latent, tmp_path)
    assert (error.tensor, error.difference) == ("kv_caches[1].latents", 0.5)


def test_a_write_outside_the_slots_is_found(tmp_path):
    def other_block(caches):
        caches[2][4, 2, 3] = 9

    assert wrong(other_block, tmp_path, strict_writes=True).tensor == "kv_caches[2]"
