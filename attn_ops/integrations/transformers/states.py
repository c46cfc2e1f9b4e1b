"""Layers with a state of Transformers models, by the functions that their modules call.

    a layer's forward, [1, T, D] as [T, 1, D]   every row is a sequence of one token
    cache.get_conv_state(layer_idx)             `StateCache` gives a handle, `State`
    causal_conv1d_update(x, handle, ...)        dispatches by the handle, to `attn_ops.ops.states`

So the layer's own code decodes one token a sequence, and rows meet in the operators alone. None of
it is looked up by a model's name. Where a function gets no handle, it is the model's own: for
`generate`, training and other models of the process.

T rows, C channels, H heads, G key heads or groups, K key size, V value size, N state size.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from attn_ops.integrations.transformers.batch import PackedPositions
from attn_ops.integrations.transformers.layers import NAME
from attn_ops.integrations.transformers.probe import AttentionProbe
from attn_ops.ops import states as ops
from attn_ops.states import NULL_SLOT, Place, StatePool, StateSpec
from attn_ops.tracing import PATCHING

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""slots [S], starts [S + 1], seq_lens [S] and kept [T], as the operators take them."""


class State:
    """What a layer holds in place of its state: where it is, and whose rows the batch has.

    Args:
        place: of it.
        cache: that gave it.
        pool: [P, ...].
        batch: as the operators take it.
        prompt_lens: [S]; None: no row is one of a prompt.
        prompt_dt: see `ssd_state_update`.
    """

    def __init__(
        self,
        place: Place,
        cache: "StateCache",
        pool: torch.Tensor,
        batch: Batch,
        prompt_lens: torch.Tensor | None = None,
        prompt_dt: tuple[float | None, float | None] = (None, None),
    ) -> None:
        self.place, self.cache, self.pool, self.batch = place, cache, pool, batch
        self.prompt_lens, self.prompt_dt = prompt_lens, prompt_dt

    def __getitem__(self, index: tuple[slice, int]) -> "State | None":
        """`state[:, head]`, where heads are computed one by one: a state of its own, by number."""
        kind, layer, first = self.place
        rows, number = index
        if first or rows != slice(None) or type(number) is not int or number < 0:
            raise ValueError(f"a part of a state must be state[:, number], got {index}")
        return self.cache.state((kind, layer, number))

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, by_columns: bool = False
    ) -> torch.Tensor:
        """The pool, of states of this shape, in memory as `StateSpec` says."""
        return self.pool

    def to(self, *args: Any, **kwargs: Any) -> "State":
        """Itself: the operators convert."""
        return self


class StateCache(PackedPositions):
    """The cache of one step of a model with states (`cache_name` is its keyword).

    Keys and values are returned unchanged, as `attention_forward` writes them.

    Args:
        pool: of the model's states.
        slots, starts, seq_lens: as the operators take them; starts are a batch's query_start_loc.
        prompt_lens: [S] int32 or int64, tokens of each request's prompt. Mamba-2 of some models
            clamps its step sizes there alone, and must have them. None: no matter.
        kept: [T], slots that keep the states behind single rows; None: there are none.

    Raises:
        ValueError: `prompt_lens` is None, and a layer clamps its step sizes in prompts.
    """

    def __init__(
        self,
        pool: StatePool,
        slots: torch.Tensor,
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        prompt_lens: torch.Tensor | None = None,
        kept: torch.Tensor | None = None,
    ) -> None:
        self.tensors = pool.tensors
        self.prompt_dt = {spec.place: spec.prompt_dt for spec in pool.specs}
        if prompt_lens is None and {*self.prompt_dt.values()} - {(None, None)}:
            raise ValueError(
                "prompt_lens must be given for layers that clamp step sizes in prompts, got None"
            )
        self.batch, self.prompt_lens = (slots, starts, seq_lens, kept), prompt_lens

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> State | None:
        """The handle of a layer's inputs."""
        return self.state(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> State | None:
        """The handle of a layer's sums; None: it has none."""
        return self.state(("recurrent", layer_idx, state_idx))

    def state(self, place: Place) -> State | None:
        """The handle of a state; None: there is none."""
        if place not in self.tensors:
            return None
        pool = self.tensors[place]
        if torch.compiler.is_compiling():
            _share_size(pool, next(iter(self.tensors.values())))
        return State(place, self, pool, self.batch, self.prompt_lens, self.prompt_dt[place])

    def update_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """Raise a ValueError: a layer that calls this has more than a token a row."""
        raise ValueError("layers with a state must decode their rows, got one that computes all")

    def update_recurrent_state(
        self, state: object, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> State:
        """The handle; the operator has written the state.

        Raises:
            ValueError: the layer has computed a state by functions that dispatch by no handle.
        """
        if not isinstance(state, State):
            raise ValueError(
                f"layers with a state must call one of {', '.join(OURS)}, got layer {layer_idx}, "
                "which computes its state by other functions"
            )
        return state

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether states before rejected tokens are kept."""
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given."""
        return 0

    # Transformers 5.17 to 5.22 read states from layers of the cache.

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether layers go on from states: always."""
        return True

    @property
    def layers(self) -> "_Layers":
        """By `layer_idx`, handles as `conv_states[state_idx]` and `recurrent_states[state_idx]`."""
        return _Layers(self)


class _Layers:
    def __init__(self, cache: StateCache) -> None:
        self.cache = cache

    def __getitem__(self, layer_idx: int) -> "_Layer":
        return _Layer(self.cache, layer_idx)


class _Layer:
    record_past = False

    def __init__(self, cache: StateCache, layer_idx: int) -> None:
        self.conv_states = _States(cache, "conv", layer_idx)
        self.recurrent_states = _States(cache, "recurrent", layer_idx)


class _States:
    def __init__(self, cache: StateCache, kind: str, layer_idx: int) -> None:
        self.cache, self.kind, self.layer_idx = cache, kind, layer_idx

    def __getitem__(self, state_idx: int) -> State | None:
        return self.cache.state((self.kind, self.layer_idx, state_idx))


def _share_size(pool: torch.Tensor, first: torch.Tensor) -> None:
    """Let all pools have one symbol for their number of slots; see `forward._share_size`."""
    if pool.shape[0] == first.shape[0]:
        return


class StateProbe(StateCache):
    """Finds which states a forward uses: every row is a request that begins, and its state is lost.

    Args:
        probe: that gets the calls, as `states`.
        num_rows: T.
        device: of the model.
    """

    def __init__(self, probe: AttentionProbe, num_rows: int, device: torch.device) -> None:
        ones = torch.ones(num_rows, dtype=torch.int64, device=device)
        self.probe = probe
        self.batch = (ones, torch.arange(num_rows + 1, device=device), ones, None)

    def state(self, place: Place) -> State | None:
        """A handle that notes what is asked of it."""
        return ProbedState(place, self, self.probe, self.batch)


class ProbedState(State):
    def __init__(
        self, place: Place, cache: StateCache, probe: AttentionProbe, batch: Batch
    ) -> None:
        self.place, self.cache, self.probe, self.batch = place, cache, probe, batch
        self.prompt_lens, self.prompt_dt = None, (None, None)

    def tensor(
        self, shape: tuple[int, ...], dtype: torch.dtype, by_columns: bool = False
    ) -> torch.Tensor:
        self.probe.states.append(StateSpec(self.place, shape, dtype, by_columns=by_columns))
        device = self.batch[0].device
        return torch.full((NULL_SLOT + 2, *shape), float("nan"), dtype=dtype, device=device)


# -- functions that models call --------------------------------------------------------------------


def _causal_conv1d_update(
    hidden_states: torch.Tensor,
    conv_state: State,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """hidden_states [T, C, 1]."""
    shape = (weight.shape[0], weight.shape[-1] - 1)
    pool = conv_state.tensor(shape, hidden_states.dtype, by_columns=True)
    x_TC = hidden_states.squeeze(-1)
    out_TC = ops.causal_conv1d_update(x_TC, weight, bias, activation, pool, *conv_state.batch)
    # By unsqueeze(-1) a reshape that follows would ask whether T is 1.
    return out_TC.unsqueeze(1).transpose(1, 2)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: State,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, State]:
    """query, key [T, 1, G, K], value [T, 1, H, V], g [T, 1, H] or [T, 1, H, K], beta [T, 1, H]."""
    q, k, v, g, beta = (x.squeeze(1) for x in (query, key, value, g, beta))
    shape = (v.shape[1], k.shape[2], v.shape[2])
    pool = initial_state.tensor(shape, torch.float32, by_columns=True)
    rule = ops.gated_delta_rule if g.dim() == 2 else ops.kda
    out = rule(q, k, v, g, beta, use_qk_l2norm_in_kernel, pool, *initial_state.batch)
    return out.unsqueeze(1), initial_state


def _mamba2_selective_state_update(
    state: State,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """hidden_states, dt [T, H, V], A [H, V, N], B, C [T, G, N], D, dt_bias [H, V], expanded."""
    pool = state.tensor((*hidden_states.shape[1:], B.shape[-1]), torch.float32)
    D, dt_bias = (None if x is None else x[:, 0] for x in (D, dt_bias))
    inputs = (hidden_states, dt[:, :, 0], A[:, 0, 0], B, C, D, dt_bias, dt_softplus)
    clamps = (*state.prompt_dt, state.prompt_lens)
    out = ops.ssd_state_update(*inputs, *clamps, pool, *state.batch)
    return out if z is None else out * F.silu(z)


def _mamba_selective_state_update(
    state: State,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """hidden_states, dt, z [T, C], A [C, N], B, C [T, N], D, dt_bias [C]."""
    pool = state.tensor(tuple(A.shape), torch.float32)
    inputs = (hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
    return ops.selective_state_update(*inputs, pool, *state.batch)


CACHES = ("cache", "cache_params", "past_key_values")
"""Keywords by which models and layers take their cache: from Transformers 5.24 on the first."""

OURS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "causal_conv1d_update": (_causal_conv1d_update, 1, "conv_state"),
    "torch_recurrent_gated_delta_rule": (_delta_rule, 5, "initial_state"),
    "recurrent_kimi_delta_attention": (_delta_rule, 5, "initial_state"),
    "mamba2_selective_state_update": (_mamba2_selective_state_update, 0, "state"),
    "mamba_selective_state_update": (_mamba_selective_state_update, 0, "state"),
}
"""By the name in a model's module: what replaces it, and which argument is the state."""


# -- models ----------------------------------------------------------------------------------------


def state_layers(model: torch.nn.Module) -> list[Any]:
    """Modules whose class's forward calls one of `OURS`."""
    return [module for module in model.modules() if _calls(module)]


def keep_states(model: Any) -> None:
    """Let layers with a state take a `StateCache`; harmless if repeated.

    Raises:
        ValueError: a layer has a `forward` of its own, which is not the class's.
    """
    with PATCHING:
        for layer in state_layers(model):
            if (own := vars(layer).get("forward")) is not None:
                raise ValueError(
                    f"forward of {type(layer).__name__} must be its class's, got {own!r:.80}; "
                    "supported: layers with a state that nothing has replaced (kernelize)"
                )
            scope = _code_of(layer).__globals__
            for name in _calls(layer):
                if not hasattr(scope[name], "dispatches_states"):
                    scope[name] = _dispatching(scope[name], *OURS[name])
            if not hasattr(type(layer).forward, "takes_rows"):  # of the class: layers are copied
                type(layer).forward = _rows_as_batch(type(layer).forward)
            layer.model_config = model.config.get_text_config()


def state_specs(model: Any) -> list[StateSpec]:
    """The states of a model's layers, as a forward of two tokens uses them; of most models none.

    Convolutions keep inputs in the dtype that they get them in, recurrences float32.

    Args:
        model: after `attention_specs`, uncompiled.
    """
    keep_states(model)
    layers = {layer.layer_idx: layer for layer in state_layers(model)}
    if not layers:
        return []
    device = next(model.parameters()).device
    ids, probe = torch.zeros((1, 2), dtype=torch.int64, device=device), AttentionProbe()
    more = {cache_name(model): StateProbe(probe, 2, device), "use_cache": False}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        positions = torch.arange(2, device=device)[None]
        model(input_ids=ids, position_ids=positions, attn_metadata=probe, kv_caches=[], **more)
    limits = {index: _prompt_dt(layer) for index, layer in layers.items()}
    return [dataclasses.replace(spec, prompt_dt=limits[spec.place[1]]) for spec in probe.states]


def cache_name(model: Any) -> str:
    """The keyword by which a model, compiled or not, takes its cache."""
    whole = getattr(model, "_orig_mod", model)
    whole = whole.get_base_model() if hasattr(whole, "get_base_model") else whole  # peft's
    names = inspect.signature(whole.forward).parameters
    return next((name for name in CACHES if name in names), CACHES[-1])


def _prompt_dt(layer: Any) -> tuple[float | None, float | None]:
    """Limits of step sizes that bound anything."""
    low, high = getattr(layer, "time_step_limit", None) or (0.0, float("inf"))
    return (low if low > 0 else None, high if high != float("inf") else None)


def _code_of(module: torch.nn.Module) -> Any:
    return inspect.unwrap(type(module).forward)


def _calls(module: torch.nn.Module) -> list[str]:
    code = getattr(_code_of(module), "__code__", None)
    return [name for name in OURS if name in getattr(code, "co_names", ())]


def _dispatching(
    original: Callable[..., Any], ours: Callable[..., Any], place: int, name: str
) -> Callable[..., Any]:
    """A function that is ours where it gets a handle."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = args[place] if len(args) > place else kwargs.get(name)
        return (ours if isinstance(state, State) else original)(*args, **kwargs)

    call.dispatches_states = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def _rows_as_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward, which is called with [1, T, D] as [T, 1, D] where the cache is ours."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs.get(name) for name in CACHES]
        cache = next((cache for cache in given if isinstance(cache, StateCache)), None)
        if cache is None:
            config = getattr(self, "model_config", None)  # None: nobody has asked for states
            if getattr(config, "_attn_implementation", None) == NAME:  # rows of several sequences
                raise ValueError(
                    f"the cache must be a StateCache with attn_implementation={NAME!r}, got "
                    f"{[type(cache).__name__ for cache in given if cache is not None] or None}; "
                    "use graphs.DecodeSession, or, for model.generate, "
                    "set_attn_implementation('sdpa') or 'eager'"
                )
            return original(self, hidden_states, *args, **kwargs)
        if isinstance(cache, StateProbe):
            cache.probe.state_layers.append((self, (hidden_states, *args), kwargs))
        out = original(self, hidden_states.squeeze(0).unsqueeze(1), *args, **kwargs)
        return out.squeeze(1).unsqueeze(0)

    forward.takes_rows = True  # pyright: ignore[reportFunctionMemberAccess]
    return forward


@torch.no_grad()
def in_both_ways(
    layer: Any, args: tuple, kwargs: dict[str, Any], specs: Sequence[StateSpec]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer computes of rows [1, T, D] that are one prompt: by its own code, and by ours.

    Args:
        layer: prepared by `keep_states`.
        args, kwargs: that a `StateProbe` has seen.
        specs: of its states.
    """
    (name,) = [name for name in CACHES if kwargs.get(name) is not None]
    own = type(layer).forward.__wrapped__(layer, *args, **{**kwargs, name: None})
    device, number = args[0].device, args[0].shape[1]
    limited = [dataclasses.replace(spec, prompt_dt=_prompt_dt(layer)) for spec in specs]
    one, lens = (torch.tensor([n], device=device) for n in (1, number))
    starts = torch.tensor([0, number], device=device)
    cache = StateCache(StatePool(limited, 1, device), one, starts, lens, lens)
    return own, layer.forward(*args, **{**kwargs, name: cache})
