"""The backend in docs/adding_a_backend.md conforms as it stands there."""

import re
from pathlib import Path

from attn_ops.backends import registry
from tests.conformance.features import FEATURES, LENGTHS
from tests.conformance.test_conformance import test_features as check_features

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_backend.md"


def test_the_page_s_backend_conforms(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    scope = {}
    exec(code, scope)
    monkeypatch.setitem(registry._registered, "MY_BACKEND", scope["BACKEND"])
    for feature in FEATURES:
        for batch in LENGTHS:
            check_features("MY_BACKEND", "cpu", feature, batch)
