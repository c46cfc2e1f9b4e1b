"""Groups of kernels and operators by their names, for tables of what a step does."""

import re

PRODUCTS, ATTENTION, KV_WRITE = "products", "attention", "KV write"
POINTWISE, SAMPLING, OTHER = "norm, pointwise", "sampling", "other"
GROUPS = (PRODUCTS, ATTENTION, KV_WRITE, POINTWISE, SAMPLING, OTHER)

_RULES = (
    (KV_WRITE, r"write_kv|write_mla_kv|reshape_and_cache|append_paged|store_kv|\bwrite_kernel"),
    (
        SAMPLING,
        r"argmax|race_kernel|logprobs_kernel|allowed_kernel|finish_kernel|finish_step|"
        r"advance_step|take_tokens|multinomial|topk|argsort|radixsort|softmax_warp|"
        r"\b(?:count|bracket|narrow|gather_bins|search)_kernel",  # top-k and top-p
    ),
    (
        ATTENTION,
        r"attention|attn|flash|fmha|flex|mla|batchdecode|batchprefill|pagedkv|paged_kv|varlen|"
        r"\bdecode_kernel|\bprefill_kernel|\bcombine|merge_states?|mergestates|merge_parts|"
        r"schedule|absorb|project_kernel|virtual_batches|gather_kernel|gather_kv",
    ),
    (
        PRODUCTS,
        r"gemm|gemv|nvjet|cutlass|cublas|splitk|skinny|\b(?:add|b|badd|scaled_)*mm\b|_scaled_mm|"
        r"triton_tem|linear|matmul|mkl|xmma|norm_mm|gated_mlp|\bfused_kernel",
    ),
    (
        POINTWISE,
        r"triton_(?:poi|red|per|unk|for)|cpp_fused|elementwise|reduce_kernel|layer_?norm|rms_?norm|"
        r"softmax|cat|index|copy_kernel|fill|where|pow|mean|mul|add|silu|rsqrt|embedding",
    ),
)
_OURS = re.compile(r"\battn_ops(?:\.|::)")
_COMPILED = tuple((group, re.compile(rule, re.IGNORECASE)) for group, rule in _RULES)


def group_of(name: str) -> str:
    """The group of a kernel, by the first rule that its name meets."""
    # A fused kernel of Inductor is named after all that is in it, also attention that it prepares.
    if re.match(r"(?:triton_(?:poi|red|per|unk|for)|cpp)_fused", name):
        return KV_WRITE if "index_put" in name else POINTWISE
    name = _OURS.sub("", name)  # else all of our operators were attention
    return next((group for group, rule in _COMPILED if rule.search(name)), OTHER)
