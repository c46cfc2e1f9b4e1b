"""The package's configuration: which passes run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """One switch per built-in pass; `options={"collapse_views": False}` turns one off.

    `fast_prefill` is "off", "auto", where rows can be dropped, or "on", an error where they cannot.
    `attn_quant`, of the pass `quantize_output`, is "never", "auto", for schemes that gain by it, or
    "always".
    `skinny_products` and `experts`, which is also of the pass `router`, take the same words: "auto"
    is where our kernels run.
    So do `fused_mlp` and `norm_products`; "auto" is on for sessions that capture on a GPU with such
    kernels, with Inductor's `combo_kernels`, and else off: called steps of few rows lose by them.
    `batch_invariant`, of no pass, has every product computed so that a row does not depend on the
    others; one that cannot be is an error. Sessions with `batch_invariant=True` set it.
    `early_launch`, of no pass, is "auto", where the GPU launches kernels before those in front have
    ended, "on", an error where it cannot, or "off", for our own kernels, too.
    `check_passes`, of no pass, checks after each one that outputs and writes of the graph stayed.

    Raises:
        ValueError: a switch has no such value.
    """

    device_constants: bool = True
    fast_prefill: Literal["auto", "on", "off"] = "off"
    outline_layers: bool = True
    share_products: bool = True
    short_products: bool = True
    attn_quant: Literal["auto", "always", "never"] = "auto"
    collapse_views: bool = True
    experts: Literal["auto", "always", "never"] = "auto"
    skinny_products: Literal["auto", "always", "never"] = "auto"
    fused_mlp: Literal["auto", "always", "never"] = "auto"
    norm_products: Literal["auto", "always", "never"] = "auto"
    early_launch: Literal["auto", "on", "off"] = "auto"
    check_passes: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_switch(field.name, getattr(self, field.name))

    def ordered(self) -> "PassConfig":
        """The same for a model whose rows must not depend on each other."""
        always = dict.fromkeys(
            ("experts", "skinny_products", "fused_mlp", "norm_products"), "always"
        )
        return dataclasses.replace(self, batch_invariant=True, **always)  # type: ignore

    def is_on(self, switch: str) -> bool:
        """Whether the pass with that switch runs; one without a switch does."""
        return getattr(self, switch, True) not in (False, "off", "never")

    @classmethod
    def split(cls, options: Mapping[str, Any] | None) -> tuple["PassConfig", dict[str, Any]]:
        """Our options as a config, and the rest, which must be options of Inductor.

        Raises:
            ValueError: an option is neither ours nor Inductor's, has no such value, or is given
                twice, with a dash and an underscore, with two values.
        """
        import torch._inductor.config as inductor_config

        ours = {f.name for f in dataclasses.fields(cls)}
        mine, rest = {}, {}
        for name, value in (options or {}).items():
            plain = name.replace("-", "_")
            if name in ours:
                mine[name] = value
            elif _is_inductor_option(plain, inductor_config):
                _check_once(plain, value, rest)
                rest[plain] = _checked(plain, value, inductor_config)
            else:
                raise ValueError(
                    "options must name a pass or an option of torch._inductor.config, "
                    f"got {name!r}; supported: {', '.join(sorted(ours))} and Inductor's"
                )
        return cls(**mine), rest


def _check_switch(name: str, value: Any) -> None:
    """A switch takes the values of its type: a bool, or the strings of a `Literal`."""
    supported = get_args(get_type_hints(PassConfig)[name]) or (True, False)
    if not any(type(value) is type(one) and value == one for one in supported):
        *others, last = map(repr, supported)
        named = f"{', '.join(others)} or {last}"
        raise ValueError(f"options[{name!r}] must be {named}, got {value!r}")


def _check_once(name: str, value: Any, given: Mapping[str, Any]) -> None:
    if name in given and given[name] != value:
        raise ValueError(
            f"options[{name!r}] must have one value, got {given[name]!r} and {value!r}, "
            "as a name with dashes means the same"
        )


def _checked(name: str, value: Any, config: Any) -> Any:
    """`value`, if Inductor's option takes its type; options of several types take any."""
    wanted = config.get_type(name)
    if isinstance(wanted, type) and type(value) is not wanted:
        raise ValueError(f"options[{name!r}] must be a {wanted.__name__}, got {value!r}")
    return value


def _is_inductor_option(name: str, config: Any) -> bool:
    return name in config.get_config_copy()
