"""`session.update_weights` beside one device copy of the same bytes.

python -m benchmarks.update_weights
"""

from typing import Any

import torch

from attn_ops.integrations import transformers as integration
from benchmarks.batch_invariance import built
from benchmarks.harness import finish, model_of, origin, parser_of, wall_ms
from graphs import DecodeSession


def main() -> None:
    args = model_of(parser_of(__doc__))
    integration.register()
    model = built(args.model, args.layers or 32, args.device)
    compiled: Any = torch.compile(model, backend="attn_ops", fullgraph=True)
    session = DecodeSession(
        compiled, max_batch_size=1, max_tokens=128, cache_tokens=1024, merge_projections=True
    )
    session.generate([[1, 2, 3]], 4, eos=())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    num_bytes = sum(value.nbytes for value in weights.values())
    update = wall_ms(lambda: session.update_weights(weights))
    part = torch.empty(num_bytes // 4, dtype=torch.uint8, device=args.device)
    other = torch.empty_like(part)
    copy = 4 * wall_ms(lambda: other.copy_(part))
    rows = {
        "update_weights": {"ms": update, "ratio": update / copy},
        "one copy of the bytes": {"ms": copy, "ratio": 1.0},
    }
    command = "python -m benchmarks.update_weights"
    note = (
        f"{args.model}, {args.layers or 32} layers, {num_bytes / 1e9:.1f} GB, merged projections."
    )
    finish(args, {"command": command, "note": note, **origin(args), "rows": rows})


if __name__ == "__main__":
    main()
