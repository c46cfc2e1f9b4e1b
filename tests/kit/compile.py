"""Compiling in tests."""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config


@contextlib.contextmanager
def graphs_are_compiled_anew() -> Iterator[None]:
    """No graph comes from a cache, so its code is seen. Equal C++ is not built again (7 s each)."""
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


def check_no_copies(code: list[str], shape: Sequence[int]) -> None:
    """No tensor of a cache's shape is made in Inductor's code, and no loop visits all of it."""
    source, dims = "\n".join(code), ", ".join(map(str, shape))
    assert "attn_ops.attention" in source
    assert f"({dims})" in source, "the cache's size is not in the code at all"
    allocated = re.findall(rf"empty_strided\w*\(\({re.escape(dims)}\)[^\n]*", source)
    assert not allocated, allocated
    loops = [int(n) for n in re.findall(r"x\d+\s*<\s*static_cast<int64_t>\((\d+)L?\)", source)]
    assert math.prod(shape) not in loops, "a loop over every element of the cache"
    assert "aten.clone" not in source
