"""A function that compiles quickly, and what a dump of it holds."""

import json
import re

import torch

import fx_passes


def compiled_function(**options):
    """Small, so that compiling it is quick; Inductor can cache it."""
    return torch.compile(
        lambda x, w: torch.relu(x @ w), **(options or {"backend": fx_passes.attn_ops})
    )


def files(directory) -> set[str]:
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def block(page) -> dict:
    """The data of a page."""
    text = page.read_text()
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*)</script>', text)[1]
    )
