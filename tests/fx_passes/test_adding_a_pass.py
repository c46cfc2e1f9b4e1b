"""The pass and the test in docs/adding_a_pass.md do as they stand there what the page says."""

import re
import sys
import types
from pathlib import Path

import torch

from fx_passes import attn_ops, pipeline, recording, register_pass
from tests.fx_passes.test_docstrings import block, check, skipped_when

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_pass.md"


def test_the_page_s_pass(monkeypatch, aten_graph, contract):
    code, test, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    module, scope = types.ModuleType("fx_passes.passes.double_negation"), {}
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    check(module.DoubleNegation)
    assert "aten.neg" in block(module.DoubleNegation, "Before")
    exec(test, scope)
    lines = [mark.args[1] for mark in scope["test_skipped"].pytestmark]
    for line in skipped_when(module.DoubleNegation):
        assert any(line.startswith(begin) for begin in lines)
    scope["test_skipped"](aten_graph, contract)

    monkeypatch.setattr(pipeline, "_PIPELINE", list(pipeline._PIPELINE))
    register_pass(module.DoubleNegation)
    x = torch.randn(3)
    with recording() as recorder:
        got = torch.compile(lambda x: x.sin().neg().neg().double().cos(), backend=attn_ops)(x)
    torch.testing.assert_close(got, x.sin().double().cos())
    assert recorder.matches()["double_negation"] == 1
    assert any("prims.convert_element_type" in text for _, text in recorder.final_graphs)
