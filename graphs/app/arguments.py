"""The arguments of `attn-ops run`: what can be told without torch is checked without it."""

import ast
import dataclasses
import math
import re
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from graphs.app.model_file import check_file, is_file
from graphs.app.presets import PRESETS
from graphs.dumps.folder import check_room

DTYPES = ("float32", "bfloat16", "float16")
FAST_PREFILL = ("off", "auto", "on")
QUANTIZE = ("off", "fp8_row", "fp8_static", "fp8_group64", "fp8_group128")
CONFIGS = ("config.json", "adapter_config.json")
"""Files that a directory with a saved model, or with an adapter of peft, has one of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArguments:
    """What `attn-ops run` was asked for.

    Attributes:
        model: a preset, a directory that holds a model, or a Python file that defines one.
        backend: an attention backend by name; None lets `select_backend` choose.
        max_new_tokens: tokens to generate for each prompt.
        dump: where to write a dump, if at all.
        fast_prefill: the option of `fx_passes.PassConfig`.
        quantize: how inputs of linear layers are quantized to FP8.
        dtype: of the weights; None takes the preset's or the saved one.
        device: None takes a GPU if there is one.
        temperature: 0 takes the most likely token.
        top_p: as in `SamplingParams`.
        seed: of the random draws.
        compile_cache: of `SessionOptions`.

    Raises:
        ValueError: an argument is out of range.
    """

    model: str = "llama-tiny"
    backend: str | None = None
    max_new_tokens: int = 16
    dump: str | Path | None = None
    fast_prefill: str = "off"
    quantize: str = "off"
    dtype: str | None = None
    device: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    compile_cache: Path | None = None

    def __post_init__(self) -> None:
        _check_model(self.model)
        _check_known("fast_prefill", self.fast_prefill, FAST_PREFILL)
        _check_known("quantize", self.quantize, QUANTIZE)
        if self.backend is not None:
            _check_known("backend", self.backend, backend_names())
        if self.dtype is not None:
            _check_known("dtype", self.dtype, DTYPES)
        if self.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be cpu, cuda or cuda:N, got {self.device!r}")
        if self.dump is not None:
            check_room(self.dump)
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a positive int, got {self.max_new_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be greater than 0 and at most 1, got {self.top_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be an int of 64 bits, got {self.seed}")

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p}


def backend_names() -> list[str]:
    """The names of `attn_ops.backend_names`, without torch.

    Those that are built in are read from the source of the registry: importing it imports torch.
    """
    package = find_spec("attn_ops")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).with_name("backends").joinpath("registry.py").read_text()
    values = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
    }
    group = ast.literal_eval(values["ENTRY_POINT_GROUP"])
    installed = [point.name for point in entry_points(group=group)]
    return list(dict.fromkeys([*ast.literal_eval(values["_BUILT_IN"]), *installed]))


def _check_model(model: str) -> None:
    if model in PRESETS:
        return
    if is_file(model):
        return check_file(model)
    if not Path(model).is_dir():
        raise ValueError(
            "model must be a preset, a directory or a Python file, "
            f"got {model!r}; supported: {', '.join(PRESETS)}"
        )
    if not any(Path(model, name).is_file() for name in CONFIGS):
        raise ValueError(
            f"model must be a directory with a saved model, got {model!r} without {CONFIGS[0]}"
        )


def _check_known(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        what = "a known name" if name == "backend" else "known"
        raise ValueError(f"{name} must be {what}, got {value!r}; supported: {', '.join(known)}")
