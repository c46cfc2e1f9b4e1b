"""What every rank of tests/scenarios/test_ranks.py runs: torchrun starts it.

torchrun --nproc-per-node 2 tests/scenarios/ranks_program.py FOLDER SETTINGS
"""

import datetime
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from attn_ops.integrations.transformers import register
from graphs import AsyncSession, DecodeSession, Generation, RequestError, follow, lead
from graphs.step import ranks
from graphs.step.ranks import RanksDiffer


def calls_of_one_rank(session, prompts) -> tuple[list[Generation], list[str]]:
    """`generate`, bad and large arguments, streams that are left, and an AsyncSession."""
    results = session.generate(prompts, 8)
    errors = []
    for call in (
        lambda: session.generate(prompts, 8, logits_processor=lambda tokens, logits: logits),
        lambda: session.generate(prompts, 8, top_p=7),
        lambda: session.update_weights({}),
        lambda: follow(session),
        session.generate,
    ):
        try:
            call()
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    left = session.stream(prompts[1], 8)
    next(left)
    with session.lock:  # as where another thread runs a call
        left.close()
    assert len(session.score([[3] * 60] * 40)) == 40
    for output in session.stream(prompts[0], 8):
        assert output.token_id == results[0].token_ids[0]
        break
    with AsyncSession(session) as asynchronous:
        again = [handle.result() for handle in [asynchronous.submit(p, 8) for p in prompts]]
    assert [r.token_ids for r in again] == [r.token_ids for r in results]
    return results, errors


def left_alone(session, prompts) -> list[str]:
    """What the rank that leads gets where the other one follows no more, but has not ended."""
    errors = []
    if dist.get_rank():
        session.ranks.listen(first=False)
        time.sleep(3 * ranks.PATIENCE.total_seconds())
        return errors
    try:
        with lead(session):
            for _ in range(2):
                try:
                    session.generate(prompts, 8)
                except RanksDiffer as error:
                    errors.append(str(error))
            raise KeyError("the caller's")
    except KeyError as error:
        errors.append(str(error))
    return errors


def raising(tokens, logits):
    raise ZeroDivisionError("of one rank")


def main() -> None:
    folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if wanted.get("device") == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    register()
    for name, own in wanted["jobs"].items():
        patience = (wanted | own).get("patience", 30)
        ranks.PATIENCE = datetime.timedelta(seconds=patience)
        try:
            found = decoded(folder / name, wanted | own)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        (folder / name / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    os._exit(0)  # a rank that has failed waits for nobody


def made(folder: Path, wanted: dict) -> DecodeSession:
    """This rank's session of the model in a folder."""
    rank = dist.get_rank()
    if rank == wanted.get("has_other"):
        folder = folder.parent / wanted["other"]
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="attn_ops",
        tp_plan="auto",
        dtype=getattr(torch, wanted.get("dtype", "float32")),
        **wanted.get("loaded", {}),
    ).eval()
    if wanted.get("compile"):
        passes = wanted.get("passes")
        model = torch.compile(model, backend="attn_ops", fullgraph=True, options=passes)
    options = wanted["options"] | wanted.get("options_of", {}).get(str(rank), {})
    return DecodeSession(model, **{"max_batch_size": 4, "max_tokens": 64, **options})


def decoded(folder: Path, wanted: dict) -> dict:
    """What a session of the model in a folder has done."""
    rank, session = dist.get_rank(), made(folder, wanted)
    prompts = wanted["prompts"]
    asked, new = dict(wanted.get("asked", {})), wanted.get("new", 8)
    if rank == wanted.get("without_last"):
        prompts = prompts[:-1]
    if rank == wanted.get("longer"):
        new += 1
    if rank == wanted.get("draws"):
        asked |= {"temperature": 1.0, "seed": 7}
    if rank == wanted.get("raises"):
        asked["logits_processor"] = raising
    if rank == wanted.get("hangs"):
        time.sleep(20)
    if rank == wanted.get("ends"):
        os._exit(0)  # any other code, and torchrun ends the others
    results, errors = [], []
    if wanted.get("deserts"):
        return {"left": left_alone(session, prompts)}
    if wanted.get("again"):
        try:
            session.generate(prompts, new, **asked)
        except (RanksDiffer, RequestError) as error:
            errors.append(str(error))
        dist.barrier()  # both go on
        session = DecodeSession(session.original, max_batch_size=4, max_tokens=64)
        results = session.generate(prompts, new)
    elif not wanted.get("leads"):
        results = session.generate(prompts, new, **asked)
    elif rank:
        follow(session)
        follow(session)
    else:
        with lead(session):
            pass
        with lead(session):
            results, errors = calls_of_one_rank(session, prompts)
    spec = session.specs[0]
    return {
        "tokens": [result.token_ids for result in results],
        "logprobs": [
            [entry[token].logprob for token, entry in zip(r.token_ids, r.logprobs or ())]  # noqa: B905
            for r in results
        ],
        "errors": errors,
        "steps": sum(session.num_steps.values()),
        "captured": session.num_steps["captured"],
        "verified": session.verifier.num_checked if session.verifier else 0,
        "heads": [spec.num_heads, spec.num_kv_heads],
        "breaks": session.counters.num_breaks,
        "recompiles": session.counters.num_recompiles,
        "matches": session.compile_record.matches(),
        "parts": all(type(p) is torch.nn.Parameter for p in session.original.parameters()),
    }


if __name__ == "__main__":
    main()
