"""A dump of a whole session."""

import shutil

import pytest
import torch

import fx_passes
import graphs


@pytest.fixture(scope="session")
def dumped(tmp_path_factory, make_model):
    """A dump of three layers, and its session's report."""
    model = make_model("llama", num_hidden_layers=3)
    compiled = torch.compile(model, backend=fx_passes.attn_ops, fullgraph=True)
    session = graphs.DecodeSession(compiled, max_batch_size=2, max_tokens=32)
    with graphs.dump(tmp_path_factory.mktemp("page") / "a b") as directory:
        session.generate([[1, 2, 3]], 2)
        report = session.report()
    return directory, report, session


@pytest.fixture
def copied(dumped, tmp_path):
    return shutil.copytree(dumped[0], tmp_path / "dump")
