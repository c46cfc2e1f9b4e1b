"""What an error says: whether our code refused, torch would not compile, or something broke."""

import traceback
from pathlib import Path

OURS = ("attn_ops", "fx_passes", "graphs")
REFUSALS = (ValueError, TypeError, RuntimeError)


def kind_of(error: BaseException) -> str:
    """Whether our code refused, torch would not compile, or something broke."""
    if type(error).__module__.startswith("torch._dynamo"):
        return "uncompilable"
    frames = traceback.extract_tb(error.__traceback__)
    parts = Path(frames[-1].filename).parts if frames else ()
    inside = any(name in parts for name in OURS) and "site-packages" not in parts
    named = isinstance(error, REFUSALS) or type(error).__name__ == "CaptureError"
    return "refused" if inside and named else "crash"


def told(error: BaseException) -> str:
    """Type, place and first line of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__} at {where}: {text[0] if text else ''}"[:300]
