"""What a request takes from the model's generation config where its caller says nothing."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from graphs.requests.tokens import listed_ids

DRAWN = ("temperature", "top_k", "top_p", "min_p")
"""Fields that count only where the config says `do_sample`."""


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The end of requests and their sampling, as `generate` of Transformers has them."""

    eos: frozenset[int] = frozenset()
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, vocab_size: int) -> "Defaults":
        """Those of the model now; it may have no generation config.

        eos tokens outside the vocabulary are left out: no step draws them. A temperature that is
        not given is 1 with `do_sample`; any other field that is not given is off.
        """
        config = getattr(model, "generation_config", None)
        names, sampling = ("repetition_penalty",), {}
        if getattr(config, "do_sample", None):
            names, sampling = (*DRAWN, *names), {"temperature": 1.0}
        given = {name: getattr(config, name, None) for name in names}
        sampling |= {name: value for name, value in given.items() if value is not None}
        eos = listed_ids("eos", getattr(config, "eos_token_id", None))
        return cls(frozenset(int(t) for t in eos if 0 <= int(t) < vocab_size), sampling)
