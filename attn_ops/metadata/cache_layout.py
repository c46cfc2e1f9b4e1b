"""The order of heads and tokens within a block of the KV cache, as a name.

NHD: tokens before heads. HND: heads before tokens. A cache's shape is [P, 2, B, K, H] in both:
`PagedKVCache` gives HND caches as permuted tensors, and kernels read their strides.
"""

from typing import Literal, get_args

KVCacheLayoutType = Literal["NHD", "HND"]

DEFAULT_KV_CACHE_LAYOUT: KVCacheLayoutType = "NHD"

_setting: KVCacheLayoutType | None = None
"""What was set; None: nothing. Global, as in vLLM, whose engine sets it for all caches."""


def is_valid_kv_cache_layout(value: str) -> bool:
    """Whether `value` names a layout."""
    return value in get_args(KVCacheLayoutType)


def get_kv_cache_layout(cache_layout: KVCacheLayoutType | None = None) -> KVCacheLayoutType:
    """The layout to use: the argument, or what was set, or NHD.

    Raises:
        ValueError: `cache_layout` names no layout.
    """
    if cache_layout is not None:
        return _checked(cache_layout)
    return _setting or DEFAULT_KV_CACHE_LAYOUT


def set_kv_cache_layout(cache_layout: KVCacheLayoutType | None) -> None:
    """Set the layout for callers that pass none, in all threads; None unsets it.

    Raises:
        ValueError: `cache_layout` names no layout; the setting stays.
    """
    global _setting
    _setting = None if cache_layout is None else _checked(cache_layout)


def _checked(cache_layout: KVCacheLayoutType) -> KVCacheLayoutType:
    if not is_valid_kv_cache_layout(cache_layout):
        names = ", ".join(get_args(KVCacheLayoutType))
        raise ValueError(
            f"cache_layout must be a known name, got {cache_layout!r}; supported: {names}"
        )
    return cache_layout
