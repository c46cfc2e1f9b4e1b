"""What a compile process of Inductor's can do before it gets its first kernel."""


def warm_worker() -> None:
    """Import Triton's compiler and Inductor's runtime, which the first kernel would wait for."""
    import torch._inductor.runtime.triton_heuristics
    import triton.compiler  # noqa: F401
