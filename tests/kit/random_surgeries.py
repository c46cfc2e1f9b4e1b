"""Random adapters, hooks and forwards: a session gives the model's own tokens, or refuses it.

    python -m tests.kit.random_surgeries --number 200 --seed 0

Models come in random order in one process, some of them compiled or merged. A seed says it all.
"""

import argparse
import collections
import random
from typing import Any

import peft
import torch
from torch import nn

from tests.kit.models import build_model
from tests.kit.sessions import make_session, tokens_of

PROMPTS = [[5, 9, 33, 2, 61], [7], [11, 12]]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NEW_TOKENS = 6

ADAPTERS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 4, "init_lora_weights": False},
    "DORA": {"r": 4, "init_lora_weights": False, "use_dora": True},
    "ALORA": {"r": 4, "init_lora_weights": False, "alora_invocation_tokens": [33, 2]},
    "IA3": {"feedforward_modules": []},
    "VERA": {"r": 8},
    "OFT": {"oft_block_size": 4, "r": 0},
    "BOFT": {"boft_block_size": 4},
    "LOHA": {"r": 4},
    "LOKR": {"r": 4},
    "HRA": {"r": 4},
    "LILY": {},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
}


def with_adapter(model: Any, rng: random.Random) -> tuple[Any, str]:
    name = rng.choice(list(ADAPTERS))
    kind = peft.PeftType("LORA" if name in ("DORA", "ALORA") else name)
    options = ADAPTERS[name] | {"task_type": "CAUSAL_LM"}
    targets = rng.sample(LINEARS, rng.randrange(1, 4))
    if name not in ("PROMPT_TUNING", "PREFIX_TUNING"):
        options["target_modules"] = targets
    model = peft.get_peft_model(model, peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](**options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model = model.eval().requires_grad_(False)
    is_wrapped = "TUNING" in name or rng.random() < 0.5
    return model if is_wrapped else model.base_model.model, f"{name} of {targets}"


def like(output: Any, factor: float) -> Any:
    if isinstance(output, torch.Tensor):
        return output * factor
    return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output


def patch(module: nn.Module, kind: str, factor: float) -> None:
    if kind == "hook":
        module.register_forward_hook(lambda m, args, out: like(out, factor))
    elif kind == "hook with keywords":
        module.register_forward_hook(
            lambda m, args, keywords, out: like(out, factor), with_kwargs=True
        )
    elif kind == "pre-hook":
        module.register_forward_pre_hook(lambda m, args: like(args, factor) if args else None)
    elif kind == "forward":
        forward = module.forward
        module.forward = lambda *args, **keywords: like(forward(*args, **keywords), factor)
    elif kind == "class":
        own = type(module)
        body = {"forward": lambda self, *a, **k: like(own.forward(self, *a, **k), factor)}
        module.__class__ = type(f"Patched{own.__name__}", (own,), body)
    else:
        module.weight = nn.Parameter(module.weight * factor, requires_grad=False)


KINDS = ["hook", "hook with keywords", "pre-hook", "forward", "class", "weight"]


def altered(seed: int) -> tuple[Any, list[str], random.Random]:
    """A model, and what was done to it; equal for equal seeds."""
    rng = random.Random(seed)
    model = build_model("llama", num_layers=1, attn_implementation="attn_ops")
    torch.manual_seed(seed)
    done = []
    for _ in range(rng.randrange(3)):
        names = [n for n, m in model.named_modules() if n.endswith(("_proj", "mlp", "norm"))]
        name, kind = rng.choice(names), rng.choice(KINDS)
        if kind == "weight" and name.endswith("mlp"):
            continue
        patch(model.get_submodule(name), kind, rng.choice((-1.0, 0.5, 3.0)))
        done.append(f"{kind} of {name}")
    if not done or rng.random() < 0.4:
        model, what = with_adapter(model, rng)
        done.append(what)
    return model, done, rng


def own_tokens(model: Any) -> list[list[int]]:
    """By the model's `generate`, with Transformers' eager attention."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.set_attn_implementation("eager")
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def run_model(seed: int, compiled_part: float) -> str:
    """`refused`, or what was equal; raises an AssertionError where tokens differ."""
    wanted = own_tokens(altered(seed)[0])
    model, done, rng = altered(seed)
    merges, compiles = rng.random() < 0.5, rng.random() < compiled_part
    run = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
    try:
        session = make_session(run, merge_projections=merges)
        found = tokens_of(session.generate(PROMPTS, NEW_TOKENS))
    except ValueError as error:
        return f"refused: {str(error)[:60]}"
    assert found == wanted, f"seed {seed}, compiled {compiles}, merged {merges}: {done}"
    return "compiled, equal" if compiles else "equal"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", type=float, default=0.3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.number):
        if seed % 8 == 0:  # Dynamo's recompile_limit
            torch._dynamo.reset()
        counts[run_model(seed, arguments.compiled)] += 1
    for what, number in counts.most_common():
        print(number, what)


if __name__ == "__main__":
    main()
