"""The layout of KV caches by name."""

import typing
from collections.abc import Iterator

import pytest

from attn_ops.metadata import (
    KVCacheLayoutType,
    get_kv_cache_layout,
    is_valid_kv_cache_layout,
    set_kv_cache_layout,
)


@pytest.fixture
def layout() -> Iterator[None]:
    yield
    set_kv_cache_layout(None)


@pytest.mark.usefixtures("layout")
def test_kv_cache_layout():
    """The argument wins over the setting, the setting over the default."""
    assert typing.get_args(KVCacheLayoutType) == ("NHD", "HND")
    assert get_kv_cache_layout() == "NHD"
    assert get_kv_cache_layout("HND") == "HND"
    set_kv_cache_layout("HND")
    assert get_kv_cache_layout() == "HND"
    assert get_kv_cache_layout("NHD") == "NHD"
    set_kv_cache_layout("NHD")
    assert get_kv_cache_layout() == "NHD"
    set_kv_cache_layout("HND")
    for call in (set_kv_cache_layout, get_kv_cache_layout):
        with pytest.raises(ValueError, match="cache_layout"):
            call("DNH")
    assert get_kv_cache_layout() == "HND", "a refused name changes nothing"
    set_kv_cache_layout(None)
    assert get_kv_cache_layout() == "NHD"
    names = ("NHD", "HND", "nhd", "", "NH")
    assert [is_valid_kv_cache_layout(n) for n in names] == [True, True, False, False, False]
