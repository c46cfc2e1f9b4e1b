"""Our attention in the shape of a vLLM backend: declaration, metadata builder, layer.

vLLM finds the declaration by its path, `backend.AttnOps_<NAME>`: NAME is one of our backends, or
PREFERRED. T tokens, N query heads, K kv heads, H head size, P blocks, B block size.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from attn_ops.backends import Backend, get_backend, select_backend
from attn_ops.integrations.vllm import CLASS_PREFIX, PREFERRED
from attn_ops.integrations.vllm.versions import (
    api,
    logger,
    our_batch,
    our_cache,
    our_cache_dtype,
    stride_order,
    write_cache,
)
from attn_ops.metadata import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionSpec,
    Support,
)
from attn_ops.metadata.features import spec_fields
from attn_ops.ops.attention import attention

WIDEST = "TRITON"
"""Takes whatever the backends before it in the order of preference take, and more. PREFERRED
declares what it can."""


def __getattr__(name: str) -> type:
    """The class that `backend_class` makes for the backend in its name."""
    if not name.startswith(CLASS_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return backend_class(name.removeprefix(CLASS_PREFIX))


# Cached: vLLM compares the classes of layers, which must be one class for one name.
@functools.cache
def backend_class(name: str) -> type:
    """`AttnOpsBackend` for our backend `name`, or for PREFERRED."""
    fields: dict[str, Any] = {"backend_name": name, "__module__": __name__}
    builder = type(f"{CLASS_PREFIX}{name}_Builder", (AttnOpsMetadataBuilder,), fields)
    return type(f"{CLASS_PREFIX}{name}", (AttnOpsBackend,), fields | {"builder_class": builder})


def declared(name: str) -> Backend:
    """The backend whose declaration is shown to vLLM before any layer is known."""
    return get_backend(WIDEST if name == PREFERRED else name)


def chosen(
    name: str, specs: Sequence[AttentionSpec], block_size: int, device: torch.device
) -> Backend:
    """The backend that computes layers of these geometries.

    Raises:
        ValueError: it does not take them; the reasons are in the message.
    """
    asked = None if name == PREFERRED else name
    found = select_backend(specs, block_size=block_size, device=device, backend=asked)
    logger.info("attn_ops computes CUSTOM attention by %s: %s", found.backend.name, found.why)
    return found.backend


class AttnOpsBackend(api.AttentionBackend):
    """What vLLM asks before it makes layers, answered by the declaration of our backend."""

    backend_name: ClassVar[str] = PREFERRED
    builder_class: ClassVar[type]
    forward_includes_kv_cache_update: bool = False  # `do_kv_cache_update` is called for it

    @classmethod
    def support(cls) -> Support:
        """The declaration."""
        return declared(cls.backend_name).support

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks the name up among its own

    @staticmethod
    def get_impl_cls() -> type:
        return AttnOpsImpl

    @classmethod
    def get_builder_cls(cls) -> type:
        return cls.builder_class

    # -- what it takes -----------------------------------------------------------------------------

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.support().dtypes

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(cls.support().head_sizes)

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        sizes = cls.support().block_sizes
        if cls.backend_name == PREFERRED:  # the others' choice must not fail by a large block
            sizes = [size for size in get_backend("AUTO").support.block_sizes if size in sizes]
        return list(sizes) or [api.MultipleOf(1)]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        names = [our_cache_dtype(kv_cache_dtype, dtype) for dtype in cls.support().dtypes]
        return any(name in cls.support().kv_cache_dtypes for name in names)

    @classmethod
    def supports_sink(cls) -> bool:
        return cls.support().sinks

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return cls.support().sliding_window

    @classmethod
    def supports_non_causal(cls) -> bool:
        return cls.support().non_causal

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *rest: Any, **more: Any
    ) -> str | None:
        """Why not, where each alone is taken."""
        if cls.support().latent:
            return f"backend {cls.backend_name} must take plain attention, got one of MLA alone"
        if our_cache_dtype(kv_cache_dtype, dtype) is None:
            return (
                f"kv_cache_dtype must be auto or FP8 for a model in {dtype}, got {kv_cache_dtype}"
            )
        return None

    # -- the cache of vLLM 0.24 --------------------------------------------------------------------

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return stride_order(include_num_layers_dimension)


class StepMetadata:
    """vLLM's batch. Our metadata of it is made by the first layer that runs.

    A replayed graph runs no layer, so it costs nothing there. Under capture it is made inside the
    graph: what a backend plans on the device is then planned anew by every replay.
    """

    def __init__(self, builder: "AttnOpsMetadataBuilder", common: Any, captured: bool) -> None:
        self._builder = builder
        self._common = copy.copy(common)  # vLLM assigns to fields of it for the next draft
        self._captured = captured
        self._made: AttentionMetadata | None = None
        self._made_under_capture = False

    @property
    def num_actual_tokens(self) -> int:
        return self._common.num_actual_tokens

    @property
    def ours(self) -> AttentionMetadata:
        """Our metadata, for layers that run now."""
        capturing = self._builder.on_gpu and torch.cuda.is_current_stream_capturing()
        if self._made is None or capturing != self._made_under_capture:
            self._made_under_capture = capturing
            self._made = self._builder.make(self._common, capturing or self._captured)
        return self._made


class AttnOpsMetadataBuilder(api.AttentionMetadataBuilder):
    """Makes a step's metadata for layers of one kind of vLLM, whose geometries may differ."""

    backend_name: ClassVar[str] = PREFERRED

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        device, block_size = torch.device(device), kv_cache_spec.block_size
        found = vllm_config.compilation_config.static_forward_context
        layers = [found[name] for name in layer_names]
        specs = [layer.impl.spec(vllm_config.model_config.dtype) for layer in layers]
        self.on_gpu = device.type == "cuda"
        self._layers = dict(zip(specs, layers, strict=True))  # one of each geometry
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        backend = chosen(self.backend_name, specs, block_size, device)
        self._ours = backend.builder(backend, specs, block_size, device, layer_names=layer_names)
        self.reorder_batch_threshold = self._ours.reorder_batch_threshold
        self._planned: torch.cuda.Event | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Never for a backend that plans on the host: vLLM does not say which graph it replays."""
        backend = declared(cls.backend_name)
        on_host = backend.builder.plans_on_host or backend.builder.needs_mirrors
        level = AttentionCGSupport.NEVER if on_host else backend.support.cudagraph
        return api.AttentionCGSupport[level.name]

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StepMetadata:
        """The step's metadata. `use_cascade_attention` is False: no prefix is shared."""
        return StepMetadata(self, common_attn_metadata, captured=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepMetadata:
        """Metadata of a step that is captured next, whose kernels are compiled and loaded here.

        vLLM warms up with lengths of its own, for which other kernels may run.
        """
        step = StepMetadata(self, common_attn_metadata, captured=True)
        for spec, layer in self._layers.items():
            if layer.kv_cache.numel():
                shape = (step.num_actual_tokens, spec.num_heads, spec.head_size)
                q_TNH = torch.zeros(shape, dtype=spec.dtype, device=self.device)
                with torch.inference_mode():
                    layer.impl.attend(layer, q_TNH, layer.kv_cache, step)
        return step

    def make(self, common: Any, captured: bool) -> AttentionMetadata:
        """Our metadata of vLLM's batch `common`; for a capture by bounds, as replays differ."""
        if captured:
            batch = our_batch(common, on_host=False)
            batch.max_seq_len = max(batch.max_seq_len, self._max_model_len)
            return self._ours.build_for_cudagraph_capture(batch)
        in_turn = self._ours.plans_in_turn and self.on_gpu
        if in_turn and self._planned is not None:
            self._planned.synchronize()
        made = self._ours.build(0, our_batch(common, on_host=self._ours.plans_on_host))
        if in_turn:
            self._planned = torch.cuda.current_stream().record_event()
        return made


class AttnOpsImpl(api.AttentionImpl):
    """One attention layer of vLLM.

    Raises:
        ValueError: the layer is none of a decoder, or asks for something we do not know.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        if attn_type != "decoder":
            raise ValueError(
                f"attn_type must be decoder, got {attn_type}; encoders have no paged cache, which "
                "the operators read; supported: decoder"
            )
        if unknown:
            raise ValueError(
                f"arguments of a layer must be known, got {', '.join(unknown)}; supported: sinks"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.asked = {
            "sliding_window": sliding_window,
            "soft_cap": logits_soft_cap or None,  # vLLM's 0 is none
            "alibi_slopes": slopes,
            "sinks": sinks,
        }
        self._keywords = {name: value for name, value in self.asked.items() if value is not None}

    def spec(self, dtype: torch.dtype) -> AttentionSpec:
        """Geometry of the layer in a model of `dtype`."""
        return AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            dtype,
            kv_cache_dtype=our_cache_dtype(self.kv_cache_dtype, dtype) or self.kv_cache_dtype,
            **spec_fields(self.asked),
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, N, H] over the cache, into output [T, N, H].

        Keys and values are written before, by `do_kv_cache_update`.

        Raises:
            ValueError: output quantization is asked for, or the backend refuses the layer.
        """
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("output_scale must be None, got a tensor; supported: None")
        if attn_metadata is None:  # vLLM measures the memory that the model takes
            return output.zero_()
        out_TNH = self.attend(layer, query, kv_cache, attn_metadata)
        return output.copy_(out_TNH.view_as(output))

    def attend(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: StepMetadata
    ) -> torch.Tensor:
        """Attention of query [T, N, H], in a tensor of its own; rows behind the batch are 0."""
        return attention(
            query, our_cache(kv_cache), step.ours, self.scale, **self._options(layer, query)
        )

    def _options(self, layer: Any, query: torch.Tensor) -> dict[str, Any]:
        """Keywords of `attention`."""
        slopes = self._keywords.get("alibi_slopes")
        if slopes is not None and slopes.device != query.device:
            self._keywords["alibi_slopes"] = slopes.to(query.device)
        name = our_cache_dtype(self.kv_cache_dtype, query.dtype)
        if name == "auto":
            return self._keywords
        scales = {"k_scale": layer._k_scale.view(1), "v_scale": layer._v_scale.view(1)}
        return self._keywords | scales | {"kv_cache_dtype": name or self.kv_cache_dtype}

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value [>= T, K, H] at the slots [T]; rows with slot -1 are padding."""
        write_cache(
            key,
            value,
            our_cache(kv_cache),
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )
