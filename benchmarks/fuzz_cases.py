"""What `fuzz_attention` draws: a geometry that a backend declares, and a batch, from one seed."""

import dataclasses
import math
import random

import torch

from attn_ops import AttentionSpec, Backend
from attn_ops.metadata import AttentionCGSupport
from attn_ops.output_quant.schemes import SCHEMES, OutputQuant
from attn_ops.testing.quantized import forms_of
from benchmarks.fuzz_latent import draw_latent_spec, draw_workspace

HEADS = ((2, 2), (4, 4), (4, 2), (8, 2), (6, 2), (14, 2), (32, 8), (4, 1), (16, 1))
ANY_HEAD_SIZE = (8, 16, 24, 64, 80, 128)
ANY_BLOCK_SIZE = (1, 3, 16, 32)
WINDOWS = (1, 2, 9, 16, 17, 33, 128, 1000)
LONGEST, TAIL = 700, 5000
"""seq_lens usually reach up to the first, and once in `TAIL_ODDS` up to the second."""
TAIL_ODDS = 50
MOST_SCORES = 2**19
"""Query rows times keys of one request: what the oracle holds in float64, times heads."""


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A layer's geometry and what kernels are compiled for; window lengths vary with the case."""

    spec: AttentionSpec  # without a window
    block_size: int
    window: bool
    lse: bool
    cache_layout: str  # NHD or HND
    cross: bool  # non-causal over keys that are not the rows' own
    quant: OutputQuant | None = None  # the output is quantized besides


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, in full: what is drawn on a device follows from the seed."""

    seed: int
    backend: str
    geometry: Geometry
    sliding_window: int | None
    attention_chunk_size: int | None
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_padding_rows: int
    prefix_blocks: int  # blocks that all requests share; the batch is built for cascade attention
    writes: bool  # write_kv puts this step's tokens into the cache first
    strided_q: bool  # q is a slice of a fused projection
    unknown_lengths: bool  # no mirrors on the host, and max_seq_len is a bound
    workspace: int | None = None  # tokens, of latent attention; None: all that a batch has fit

    @property
    def spec(self) -> AttentionSpec:
        """The layer's."""
        return dataclasses.replace(
            self.geometry.spec,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )

    def __str__(self) -> str:
        return "\n".join(f"  {f.name}: {getattr(self, f.name)}" for f in dataclasses.fields(self))


def geometries_of(
    backend: Backend, device: torch.device, count: int, seed: int = 0
) -> list[Geometry]:
    """At most `count` different geometries that the backend declares; the same for one seed."""
    rng = random.Random(f"{seed} {backend.name} {device.type}")
    draw = _draw_conformance if backend.name == "FLASHINFER" else _draw_geometry
    if backend.support.latent:
        draw = _draw_latent
    found: dict[Geometry, None] = {}
    for _ in range(20 * count):
        found[draw(rng, backend, device)] = None
        if len(found) == count:
            break
    return list(found)


def _draw_geometry(rng: random.Random, backend: Backend, device: torch.device) -> Geometry:
    support = backend.support

    def asked(declared: bool, odds: float) -> bool:
        return rng.random() < odds and declared

    causal = not asked(support.non_causal, 0.2)
    cross = not causal and rng.random() < 0.4
    may_window = support.sliding_window and (causal or support.non_causal_window) and not cross
    heads = rng.choice(HEADS)
    spec = AttentionSpec(
        *heads,
        rng.choice(support.head_sizes or ANY_HEAD_SIZE),
        rng.choice(support.dtypes),
        soft_cap=rng.choice((5.0, 30.0)) if asked(support.soft_cap, 0.2) else None,
        kv_cache_dtype=rng.choice(("auto", *support.kv_cache_dtypes)),
        alibi=asked(support.alibi and not cross, 0.2),
        sinks=asked(support.sinks, 0.2),
        causal=causal,
    )
    return Geometry(
        spec=spec,
        block_size=rng.choice(support.block_sizes or ANY_BLOCK_SIZE),
        window=asked(may_window, 0.3),
        lse=asked(support.lse, 0.4),
        cache_layout=rng.choice(("NHD", "NHD", "HND")),
        cross=cross,
        quant=_draw_quant(rng, backend, spec, device) if rng.random() < 0.5 else None,
    )


def _draw_latent(rng: random.Random, backend: Backend, device: torch.device) -> Geometry:
    spec = draw_latent_spec(rng, backend)
    return Geometry(
        spec=spec,
        block_size=rng.choice(backend.support.block_sizes or ANY_BLOCK_SIZE),
        window=False,
        lse=rng.random() < 0.4 and backend.support.lse,
        cache_layout="NHD",
        cross=False,
        quant=_draw_quant(rng, backend, spec, device) if rng.random() < 0.5 else None,
    )


def _draw_quant(
    rng: random.Random, backend: Backend, spec: AttentionSpec, device: torch.device
) -> OutputQuant | None:
    """A scheme that the heads allow; None for float64, which is not quantized.

    On a CPU it is one that the backend writes itself: others are written there by the reference,
    which is what they are compared with.
    """
    schemes = SCHEMES if device.type == "cuda" else backend.support.output_quant
    if not schemes:
        return None
    how = rng.choice([how for scheme in schemes for how in forms_of(scheme)])
    size = spec.head_size if spec.latent is None else spec.latent.v_head_dim
    width = spec.num_heads * size
    fits = width % (how.group or 1) == 0 and not (how.scheme == "nvfp4" and size % 2)
    return how if fits and spec.dtype != torch.float64 else None


def _draw_conformance(rng: random.Random, backend: Backend, device: torch.device) -> Geometry:
    """Only what the conformance suite has compiled anyway: FlashInfer takes minutes a module."""
    support = backend.support
    feature = rng.choice(("plain", "plain", "window", "soft_cap"))
    spec = AttentionSpec(
        *rng.choice(((4, 2), (2, 2), (8, 2), (4, 1), (2, 1))),
        64,
        rng.choice(support.dtypes),
        soft_cap=5.0 if feature == "soft_cap" else None,
    )
    return Geometry(spec, 16, feature == "window", False, rng.choice(("NHD", "HND")), False)


def draw_case(
    seed: int, backends: list[Backend], geometries: dict[str, list[Geometry]], longest: int
) -> Case:
    """The case of `seed`; `longest` bounds seq_lens."""
    rng = random.Random(seed)
    backend = rng.choice(backends)
    geometry = rng.choice(geometries[backend.name])
    spec, size = geometry.spec, geometry.block_size
    whole = spec.causal and not spec.alibi and not geometry.window and spec.latent is None
    chunk = size * rng.choice((1, 2, 4)) if whole and rng.random() < 0.15 else None
    cascades = backend.support.non_causal and backend.support.lse and whole and chunk is None
    shared = rng.randint(1, 3) if cascades and rng.random() < 0.2 else 0
    pairs = _lengths(rng, geometry, longest)
    if shared:
        pairs = [(q, q + max(n - q, shared * size)) for q, n in pairs] or [(1, shared * size + 1)]
    elif rng.random() < 0.25:
        uniform = pairs[0][0] if pairs and len({q for q, _ in pairs}) == 1 else 1
        pairs += [(max(uniform, 1), 0)] * rng.randint(1, 3)
    mirrored = backend.support.cudagraph is not AttentionCGSupport.ALWAYS or shared > 0
    if spec.latent is not None:  # all requests take the decode way where lengths are not known
        mirrored = backend.support.cudagraph is AttentionCGSupport.NEVER
    case = Case(
        seed=seed,
        backend=backend.name,
        geometry=geometry,
        sliding_window=rng.choice(WINDOWS) if geometry.window else None,
        attention_chunk_size=chunk,
        query_lens=tuple(q for q, _ in pairs),
        seq_lens=tuple(n for _, n in pairs),
        num_padding_rows=rng.choice((0, 0, 1, 5)),
        prefix_blocks=shared,
        writes=not geometry.cross and rng.random() < 0.3,
        strided_q=rng.random() < 0.4,
        unknown_lengths=not mirrored and rng.random() < 0.25,
    )
    if spec.latent is None:
        return case
    return dataclasses.replace(case, workspace=draw_workspace(rng, size))


def _lengths(rng: random.Random, geometry: Geometry, longest: int) -> list[tuple[int, int]]:
    """(query length, seq_len) of each request, padding requests aside."""
    if rng.random() < 0.02:
        return []
    num_reqs = rng.choice((1, 2, 3, 4, 5, 8, 12))
    kind = rng.choice(("decode", "decode", "uniform", "mixed", "prefill"))
    uniform = 1 if kind == "decode" else rng.randint(2, 8)
    pairs = []
    for _ in range(num_reqs):
        keys = _length(rng, geometry.block_size, longest)
        query = uniform
        if kind == "mixed":
            query = rng.choice((0, 1, 1, 2, 7, 16, 40, rng.randint(1, 200)))
        elif kind == "prefill":
            query = min(keys, longest)
        query = min(query, MOST_SCORES // max(keys, 1))
        pairs.append((query, keys if geometry.cross else max(keys, query)))
    if rng.randrange(TAIL_ODDS) == 0 and longest == LONGEST:
        query = min(pairs[0][0], 64)
        pairs[0] = (query, rng.randint(LONGEST, TAIL))
    return pairs


def _length(rng: random.Random, block_size: int, longest: int) -> int:
    """0, 1, beside a page's edge, or anything, short ones more often."""
    kind = rng.random()
    if kind < 0.05:
        return 0
    if kind < 0.15:
        return 1
    if kind < 0.5:
        edge = block_size * rng.randint(1, max(1, min(longest // block_size, 8)))
        return min(longest, max(1, edge + rng.choice((-1, 0, 1))))
    return round(math.exp(rng.uniform(0, math.log(longest))))
