"""Which backend a model gets, why, and what is said about the others."""

import dataclasses

import pytest
import torch

from attn_ops import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionSpec,
    Backend,
    LatentShape,
    Support,
    attention,
    backend_names,
    get_backend,
    grouped_backend,
    register_backend,
    select_backend,
)
from attn_ops.backends import registry
from attn_ops.backends.flex import flex_backend

TORCH = get_backend("TORCH")
PLAIN = AttentionSpec(4, 2, 64, torch.float16)
CPU: dict = {"block_size": 16, "device": "cpu"}


def zeros(q, *rest):
    return torch.zeros_like(q)


def no_library():
    return "the library must be installed, got none"


NARROW = Backend(
    name="NARROW",
    support=Support(
        devices=("cpu",),
        dtypes=(torch.float16,),
        head_sizes=(64,),
        block_sizes=(16,),
        sliding_window=False,
        soft_cap=False,
        cudagraph=AttentionCGSupport.NEVER,
    ),
    builder=TORCH.builder,
    forward=zeros,
    unavailable=TORCH.unavailable,
)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})


class EntryPoint:
    def __init__(self, name: str, load) -> None:
        self.name, self.load = name, load


@pytest.fixture
def install(monkeypatch):
    def install(*points: EntryPoint) -> None:
        def entry_points(group: str):
            assert group == "attn_ops.backends"
            return list(points)

        monkeypatch.setattr(registry, "entry_points", entry_points)

    return install


def test_a_cpu_gets_torch_and_the_reasons_against_the_others():
    selection = select_backend(PLAIN, **CPU)
    assert selection.backend is TORCH
    assert "cpu" in selection.why
    assert set(selection.reasons_against) == set(backend_names()) - {"TORCH"}
    assert all(selection.reasons_against.values())
    reason = "device must be supported, got cpu; supported: cuda"
    assert reason in selection.reasons_against["FLASH_ATTN"]


def test_latent_layers_get_backends_of_latent_attention_alone():
    latent = LatentShape(16, 8, 4, 6)
    spec = AttentionSpec.of_latent(4, latent, torch.float32)
    selection = select_backend(spec, **CPU)
    assert selection.backend.name == "TORCH_MLA"
    against = selection.reasons_against
    assert f"latent must be None, got {latent}; supported: None" in against["TORCH"]
    plain = select_backend(PLAIN, **CPU).reasons_against["TORCH_MLA"]
    assert plain == ["latent must be a LatentShape, got None; supported: latent attention alone"]
    with pytest.raises(ValueError, match="backend TORCH cannot be used: latent must be None"):
        select_backend(spec, **CPU, backend="TORCH")
    with pytest.raises(ValueError, match="no backend supports these layers"):
        select_backend([spec, PLAIN], **CPU)


def test_latent_sizes_are_declared():
    support = dataclasses.replace(get_backend("TORCH_MLA").support, latent_sizes=((512, 64),))
    spec = AttentionSpec.of_latent(4, LatentShape(16, 8, 4, 6), torch.float32)
    assert support.reasons_against(spec, 16, torch.device("cpu")) == [
        "kv_lora_rank and qk_rope_head_dim must be supported, got (16, 4); supported: (512, 64)"
    ]
    spec = AttentionSpec.of_latent(4, LatentShape(512, 8, 64, 6), torch.float32)
    assert support.reasons_against(spec, 16, torch.device("cpu")) == []


def test_what_applies_but_was_not_chosen_says_so():
    register_backend(NARROW)
    assert select_backend(PLAIN, **CPU).reasons_against["NARROW"] == [
        "applies, but TORCH was preferred"
    ]
    selection = select_backend(PLAIN, **CPU, backend="NARROW")
    assert (selection.backend, selection.why) == (NARROW, "requested")
    assert selection.reasons_against["TORCH"] == ["applies, but NARROW was requested"]


def test_order_of_preference(monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {"FLASH_ATTN": "attn_ops.backends.flash_attn"})
    second = dataclasses.replace(NARROW, name="SECOND")
    register_backend(NARROW)
    register_backend(second)
    assert backend_names() == ["FLASH_ATTN", "NARROW", "SECOND"]
    assert select_backend(PLAIN, **CPU).backend is NARROW


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({}, {"device": "meta"}, "device must be supported, got meta; supported: cpu"),
        ({"dtype": torch.float32}, {}, "dtype must be supported, got float32; supported: float16"),
        ({"head_size": 32}, {}, "head_size must be supported, got 32; supported: 64"),
        ({}, {"block_size": 32}, "block_size must be supported, got 32; supported: 16"),
        ({"sliding_window": 8}, {}, "sliding_window must be None, got 8; supported: None"),
        ({"soft_cap": 30.0}, {}, "soft_cap must be None, got 30.0; supported: None"),
    ],
)
def test_undeclared_features_are_refused(change, options, reason):
    register_backend(NARROW)
    spec, options = dataclasses.replace(PLAIN, **change), CPU | options
    with pytest.raises(
        ValueError, match=f"^backend NARROW cannot be used: {reason}; backends that can: .*"
    ):
        select_backend(spec, backend="NARROW", **options)
    if options["device"] == "cpu":
        assert select_backend(spec, **options).reasons_against["NARROW"] == [reason]
    with pytest.raises(ValueError, match=reason):
        select_backend([PLAIN, spec], backend="NARROW", **options)  # one layer of many is enough


def test_every_reason_is_given_once():
    register_backend(NARROW)
    spec = dataclasses.replace(PLAIN, soft_cap=1.0, head_size=8)
    with pytest.raises(ValueError, match="cannot be used") as error:
        select_backend([spec, spec, PLAIN], block_size=8, device="cpu", backend="NARROW")
    for word in ("head_size", "block_size", "soft_cap"):
        assert str(error.value).count(word + " must be") == 1


@pytest.mark.parametrize("feature", ["sliding_window", "soft_cap"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_operator_refuses_undeclared_features(make_batch, feature, compiled):
    """Unchecked, a backend that knows no window or cap would silently compute plain attention."""
    b = make_batch([2], [20], head_size=64, block_size=16, dtype=torch.float16, backend=NARROW)
    attend = (
        torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    )
    attend(b.q, b.kv_cache, b.meta, 1.0)
    with pytest.raises(ValueError, match=f"{feature} must be None, got 3"):
        attend(b.q, b.kv_cache, b.meta, 1.0, **{feature: 3})


@pytest.mark.parametrize(
    ("feature", "case"),
    [
        ("dtype", {"head_size": 64, "block_size": 16, "dtype": torch.float32}),
        ("head_size", {"head_size": 32, "block_size": 16, "dtype": torch.float16}),
        ("block_size", {"head_size": 64, "block_size": 8, "dtype": torch.float16}),
    ],
)
def test_undeclared_geometry_is_refused(make_batch, feature, case):
    """By the builder, and by the operator for metadata that no builder made."""
    with pytest.raises(ValueError, match=f"cannot take these layers: {feature} must be"):
        make_batch([2], [20], backend=NARROW, **case)
    b = make_batch([2], [20], **case)
    meta = AttentionMetadata(b.common, NARROW)
    with pytest.raises(ValueError, match=f"cannot run this layer: {feature} must be"):
        attention(b.q, b.kv_cache, meta, 1.0)


def test_a_missing_library_is_a_reason():
    register_backend(dataclasses.replace(NARROW, unavailable=no_library))
    message = "backend NARROW cannot be used: the library must be installed, got none"
    with pytest.raises(ValueError, match=message):
        select_backend(PLAIN, **CPU, backend="NARROW")


def test_no_backend_at_all_lists_every_reason(monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", {"FLASH_ATTN": "attn_ops.backends.flash_attn"})
    register_backend(NARROW)
    with pytest.raises(
        ValueError,
        match=r"no backend supports these layers: FLASH_ATTN: .*; NARROW: soft_cap must be",
    ):
        select_backend(dataclasses.replace(PLAIN, soft_cap=1.0), **CPU)


def test_unknown_names():
    message = "backend must be a known name, got 'NONE'; supported: AUTO, FLASH_ATTN, TRITON"
    for call in (get_backend, lambda name: select_backend(PLAIN, **CPU, backend=name)):
        with pytest.raises(ValueError, match=message):
            call("NONE")


def test_taken_names():
    register_backend(NARROW)
    for backend in (NARROW, dataclasses.replace(NARROW, name="TORCH")):
        message = f"backend.name must be new, got {backend.name}; taken: AUTO, FLASH_ATTN"
        with pytest.raises(ValueError, match=message):
            register_backend(backend)
    assert get_backend("TORCH") is TORCH


def test_nothing_is_declared_and_nothing_missing_by_default():
    support = Support(devices=("cpu",), dtypes=(torch.float16,))
    backend = Backend("LEAST", support, TORCH.builder, zeros)
    register_backend(backend)
    assert backend.missing() is None
    assert (support.sliding_window, support.soft_cap) == (False, False)
    assert support.cudagraph is AttentionCGSupport.NEVER
    assert select_backend(PLAIN, **CPU, backend="LEAST").backend is backend


def test_closures_are_taken():
    register_backend(dataclasses.replace(NARROW, forward=lambda q, *rest: torch.zeros_like(q)))
    register_backend(flex_backend("MASKED", lambda request, query, key: key <= query))
    register_backend(grouped_backend({lambda spec: True: "FLEX"}, default="TORCH", name="BOTH"))
    assert backend_names()[-3:] == ["NARROW", "MASKED", "BOTH"]


@pytest.mark.parametrize("what", ["TORCH", None, Backend])
def test_only_backends_are_registered(install, what):
    with pytest.raises(TypeError, match="backend must be a Backend, got "):
        register_backend(what)
    install(EntryPoint("THEIRS", lambda: what))
    with pytest.raises(TypeError, match="backend must be a Backend, got "):
        get_backend("THEIRS")


@pytest.mark.parametrize("name", [None, "", 3, "narrow", "Narrow"])
def test_names_are_in_upper_case(name):
    message = f"backend.name must be a name in upper case, got {name!r}"
    with pytest.raises(ValueError, match=message):
        register_backend(dataclasses.replace(NARROW, name=name))


@pytest.mark.parametrize(
    ("field", "value"),
    [("support", None), ("support", Support), ("builder", None), ("forward", "zeros")],
)
def test_fields_have_their_types(install, field, value):
    """They were taken, and failed in `select_backend`, for whoever called it next."""
    wrong = dataclasses.replace(NARROW, **{field: value})
    with pytest.raises(TypeError, match=f"^backend.{field} must be .* of backend NARROW$"):
        register_backend(wrong)
    assert "NARROW" not in backend_names()
    install(EntryPoint("NARROW", lambda: wrong))
    assert field in select_backend(PLAIN, **CPU).reasons_against["NARROW"][0]


def test_an_entry_point_has_the_name_of_its_backend(install):
    install(EntryPoint("OTHER", lambda: NARROW))
    with pytest.raises(ValueError, match="must be that of its entry point OTHER, got NARROW"):
        get_backend("OTHER")


def test_entry_points(install):
    install(EntryPoint("NARROW", lambda: NARROW))
    assert backend_names()[-1] == "NARROW"
    assert get_backend("NARROW") is NARROW
    assert select_backend(PLAIN, **CPU, backend="NARROW").backend is NARROW
    with pytest.raises(ValueError, match="must be new, got NARROW"):
        register_backend(NARROW)


def test_a_broken_entry_point_is_a_reason_and_stops_nobody_else(install):
    def load():
        raise ImportError("libbroken.so: cannot open shared object file")

    install(EntryPoint("BROKEN", load))
    selection = select_backend(PLAIN, **CPU)
    assert selection.backend is TORCH
    assert "libbroken.so" in " ".join(selection.reasons_against["BROKEN"])
    with pytest.raises(ValueError, match=r"libbroken.so"):
        select_backend(PLAIN, **CPU, backend="BROKEN")
