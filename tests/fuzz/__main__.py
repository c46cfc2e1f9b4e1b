"""Random searches for wrong tokens: `python -m tests.fuzz attention --number 1000 --seed 0`.

    attention    calls of backends, latent ones too, against the float64 reference
    blocksparse  layouts, layers and batches against dense attention under a mask
    options      what requests ask for, mixed, against Transformers one by one
    configs      generation configs and padding against `generate`
    programs     models changed before their session is made against what they compute alone
    experts      mixtures of experts against a loop in float64
    sessions     calls of a session, interrupted too, against requests alone
    states       the same of models whose layers keep states
    serve        waves of clients of examples/serve.py, many of which hang up

A seed is a case: a failure prints the command that runs it alone. The search goes on, and exits
with 1 at its end.
"""

import argparse
import collections
import importlib
import math
import time
import traceback
from collections.abc import Sequence

import torch

SEARCHES = ("attention", "blocksparse", "configs", "options", "programs", "sessions", "states")
SEARCHES += ("serve", "experts")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    found.add_argument("search", choices=SEARCHES)
    found.add_argument("--number", type=int, default=200, help="cases")
    found.add_argument("--seed", type=int, default=0, help="of the first case")
    found.add_argument("--seconds", type=float, default=math.inf, help="stop then")
    found.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=("cpu", "cuda"))
    found.add_argument("--backends", nargs="+", help="default: all that run here")
    found.add_argument("--longest", type=int, default=700, help="tokens of a sequence")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    torch.set_num_threads(1)
    run = importlib.import_module(f"tests.fuzz.{args.search}").search(args)
    outcomes, failed = collections.Counter[str](), 0
    begin = time.perf_counter()
    for seed in range(args.seed, args.seed + args.number):
        if time.perf_counter() - begin > args.seconds:
            break
        try:
            outcomes[run(seed)] += 1
        except Exception as error:  # the other cases still run
            failed += 1
            if not isinstance(error, AssertionError):
                traceback.print_exc()
            more = f" --backends {' '.join(args.backends)}" if args.backends else ""
            print(f"FAILED: {error}\n  python -m tests.fuzz {args.search} --number 1 --seed {seed} "
                  f"--device {args.device} --longest {args.longest}{more}", flush=True)  # fmt: skip
    for outcome, count in outcomes.most_common():
        print(count, outcome)
    print(f"{failed} failed, {time.perf_counter() - begin:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
