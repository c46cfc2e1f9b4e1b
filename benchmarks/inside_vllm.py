"""vLLM with our attention over vLLM with its own: `python -m benchmarks.inside_vllm`.

A decode step of the Llama-3-8B shape, bf16, random weights, greedy. vLLM schedules, compiles and
captures as it does by default; only the attention backend differs. Prompts of random tokens are
generated from twice, with prefixes cached so that they are computed once: the difference of the
times over the difference of the tokens is a step around `context`. Each way has a process:

    FLASH_ATTN       vLLM's own
    CUSTOM           ours, by our order of preference
    CUSTOM:TRITON    ours, by that backend
"""

from benchmarks.beside_vllm import Cases, main_of, of_vllm, set_environment
from benchmarks.harness import parser_of, token_ms

FEW, MANY = 8, 72


def measure(way: str, cases: Cases) -> dict[str, float]:
    """Milliseconds a step by case, of one engine."""
    set_environment()
    backend, _, inner = way.partition(":")
    if backend == "CUSTOM":
        from attn_ops.integrations.vllm import register

        register(inner or None)
    generate = of_vllm(
        cases, MANY, enable_prefix_caching=True, attention_config={"backend": backend}
    )
    return {f"{b}x{c}": token_ms(generate, b, c, FEW, MANY, repeated=True) for b, c in cases}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=["1x1024", "64x1024", "256x1024"])
    parser.add_argument("--ways", nargs="+", default=["FLASH_ATTN", "CUSTOM"])
    main_of("benchmarks.inside_vllm", parser, measure)


if __name__ == "__main__":
    main()
