"""Functions that an `AsyncSession` calls with tokens and results."""

import pytest

from graphs import AsyncSession
from tests.kit.models import build_model
from tests.kit.sessions import make_session


def test_an_error_of_on_output_ends_its_request_alone():
    with AsyncSession(make_session(build_model("llama"))) as opened:
        seen = []
        bad = opened.submit([1, 2], 8, on_output=lambda output: 1 / 0)
        good = opened.submit([5, 9, 3], 8, on_output=seen.append)
        with pytest.raises(ZeroDivisionError):
            bad.result(60)
        tokens = good.result(60).token_ids
        assert [output.token_id for output in seen] == tokens
        ended = []
        opened.submit([1], 2).when_done(lambda future: ended.append(future.result().token_ids))
        assert len(opened.submit([1], 4).result(60).token_ids) == 4
        assert len(ended[0]) == 2
