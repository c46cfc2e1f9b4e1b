"""torch's structured trace in a dump."""

import json

import torch
import torch._inductor.config as inductor_config
import torch._logging._internal as torch_logging

import graphs
from graphs.dumps import trace
from tests.graphs.dumps.dumped import compiled_function

HEAD = 'V1122 1 torch/_inductor/compile_fx.py:1] {"artifact": {"name": "%s"}, "payload": "x"}\n'


def test_nodes_of_kernels_are_read():
    def payload(data):
        return "".join(f"\t{line}\n" for line in json.dumps(data, indent=1).splitlines())

    name = "inductor_provenance_tracking_node_mappings"
    text = (
        HEAD % "other" + payload({"cppCodeToPost": {"no": ["no"]}})
        + HEAD % name + payload({"cppCodeToPost": {"mm:1": ["mm"]}}) + HEAD % "other"
        + HEAD % name + "\tnot json\n"
        + HEAD % name + payload([1])
        + HEAD % name
    )  # fmt: skip
    assert trace.origins(text) == [{"mm:1": ["mm"]}, {}, {}, {}]
    assert trace.origins("") == []


def test_a_dump_keeps_it_and_leaves_no_trace_behind(tmp_path):
    before = inductor_config.trace.provenance_tracking_level
    with graphs.dump(tmp_path):
        compiled_function()(torch.ones(2, 3), torch.ones(3, 2))
    left = [getattr(one, "baseFilename", "") for one in torch_logging.trace_log.handlers]
    assert str(tmp_path / trace.FILE) not in left
    assert inductor_config.trace.provenance_tracking_level == before
    text = (tmp_path / trace.FILE).read_text()
    assert "aot_inference_graph" in text or "inductor_post_grad_graph" in text
    (found,) = trace.origins(text)
    assert {node for nodes in found.values() for node in nodes} >= {"mm", "relu"}


def test_what_goes_wrong_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_logging, "TorchLogsFormatter", None)
    notes = []
    with trace.writing_trace(tmp_path, notes):
        pass
    assert notes[0].startswith("torch's structured trace is left out: TypeError")
