"""quick: which launches Triton is asked for, and what a later one is given."""

import types

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from attn_ops.early_launch.triton import launch
from attn_ops.early_launch.triton.launch import is_rehearsal, quick, rehearsal


class Compiled(CompiledKernel):
    """Keeps what Triton's launcher in C would be given, and what its own way of launching is."""

    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, launches, hooked):
        self.launches, self.hooked = launches, hooked
        self._run = self.launch

    def launch(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit, *args):
        assert (stream, function, metadata) == (STREAM, self.function, self.packed_metadata)
        assert launch_metadata is enter is exit is None
        self.launches.append(((x, y, z), args))

    def __getitem__(self, grid):
        return lambda *args: self.hooked.append((grid, args))


class Kernel:
    """x, n and the constants A and B, as a `JITFunction` has them."""

    def __init__(self, constants=("A", "B")):
        self.num_asked, self.launches, self.hooked = 0, [], []
        self.params = [
            types.SimpleNamespace(name=name, is_constexpr=name in constants) for name in "xnAB"
        ]

    def __getitem__(self, grid):
        def ask(*args, **constants):
            self.num_asked += 1
            return Compiled(self.launches, self.hooked)

        return ask


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch):
    active = types.SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(launch, "_COMPILED", {})
    monkeypatch.setattr(launch, "driver", types.SimpleNamespace(active=active))


X, STREAM = torch.zeros(8), 23


def test_launches_that_compile_alike_ask_once():
    kernel = Kernel()
    for n in (3, 5, 2**20 + 1):
        quick(kernel, (n,))(X, n, B=1, A=2, num_warps=4)
    assert kernel.num_asked == 1
    assert [(grid, args[1:]) for grid, args in kernel.launches] == [
        ((5, 1, 1), (5, 2, 1)),
        ((2**20 + 1, 1, 1), (2**20 + 1, 2, 1)),
    ]


def test_a_profilers_hooks_are_called(monkeypatch):
    """By Triton, which tells them what it launches."""
    kernel = Kernel()
    quick(kernel, (3,))(X, 3, B=1, A=2)
    monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [print])
    quick(kernel, (3,))(X, 3, B=1, A=2)
    assert (len(kernel.launches), kernel.hooked) == (0, [((3, 1, 1), (X, 3, 2, 1))])


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((X, 16), {}),
        ((X, 1), {}),
        ((X, 2**40 + 1), {}),
        ((X[1:], 3), {}),
        ((X.double(), 3), {}),
        ((X, None), {}),
        ((X, 3.0), {}),
        ((X, (3, 16)), {}),
        ((X, 3), {"A": 3}),
        ((X, 3), {"num_warps": 8}),
    ],
    ids=str,
)
def test_others_ask_again(args, constants):
    kernel = Kernel()
    quick(kernel, (1, 2))(X, 3, **{"A": 2, "B": 1, "num_warps": 4})
    quick(kernel, (1, 2))(*args, **({"A": 2, "B": 1, "num_warps": 4} | constants))
    assert kernel.num_asked == 2
    assert not kernel.launches


def test_a_value_that_is_given_by_name_is_not_kept():
    kernel = Kernel(constants=("B",))
    for a in (3, 5):
        quick(kernel, (1,))(X, 3, A=a, B=1)
    assert kernel.num_asked == 2


def test_descriptors_are_alike_by_their_blocks_and_dtypes():
    """Not by what they describe, which is another tensor in every launch."""
    kernel = Kernel()

    def of(rows: int, block: int, dtype: torch.dtype = torch.float16) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(torch.zeros(rows, 64, dtype=dtype), [block, 64])

    for rows in (32, 48):
        quick(kernel, (1,))(X, of(rows, 16), B=1, A=2)
    assert (kernel.num_asked, len(kernel.launches)) == (1, 1)
    quick(kernel, (1,))(X, of(32, 32), B=1, A=2)
    quick(kernel, (1,))(X, of(32, 16, torch.bfloat16), B=1, A=2)
    assert kernel.num_asked == 3


def test_a_rehearsal_compiles_and_launches_nothing():
    """What was compiled before neither."""
    kernel, compiled = Kernel(), []
    kernel.warmup = lambda *args, grid, **constants: compiled.append((args[1:], grid, constants))
    quick(kernel, (1,))(X, 3, B=1, A=2)
    with rehearsal():
        assert is_rehearsal()
        for n in (3, 5, 16):
            quick(kernel, (n,))(X, n, B=1, A=2)
    assert not is_rehearsal()
    constants = {"A": 2, "B": 1}
    assert compiled == [((3,), (3,), constants), ((16,), (16,), constants)]
    assert (kernel.num_asked, len(kernel.launches)) == (1, 0)
