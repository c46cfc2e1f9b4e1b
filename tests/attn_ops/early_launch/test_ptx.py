"""No kernel of ours reads, writes or lets another start before it has waited: seen in its PTX."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attn_ops.early_launch.faulty_kernels import EXPECTED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
ROOT = Path(__file__).parents[3]
QUICK = ("planted", "products")
OTHERS = ("ranks", "triton", "blocksparse", "mla", "query", "states", "step", "experts")


def compiled(*groups: str) -> list[dict]:
    """What `launches` found, in a process that compiles kernels and interprets none."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.attn_ops.early_launch.launches", *groups]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def with_parameter(name: str) -> set[str]:
    """Kernels of the packages that have a parameter of that name, with their modules."""
    found = set()
    for package in ("attn_ops", "graphs", "fx_passes"):
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text())):
                kernel = isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
                if kernel and name in [argument.arg for argument in node.args.args]:
                    found.add(f"{module}.{node.name}")
    return found


@pytest.mark.slow
def test_products_wait_and_faults_are_found():
    found = compiled(*QUICK)
    faulty = {
        one["name"].rpartition(".")[2]: one["faults"] for one in found if "faulty" in one["name"]
    }
    assert faulty == EXPECTED
    ours = [one for one in found if "faulty" not in one["name"]]
    assert ours
    assert all(one["early"] and not one["faults"] for one in ours), ours


@pytest.mark.slow
def test_every_kernel_waits():
    """Those of a step: attention, latent attention, products, states, sampling, its end.

    What is no constant is given by position, or `quick` would ask Triton for each launch.
    """
    found = compiled("products", *OTHERS)
    assert [one["name"] for one in found if not one["by_position"]] == []
    wrong = [one for one in found if not one["early"] or one["faults"]]
    assert wrong == []
    assert {one["name"] for one in found} == with_parameter("PDL")
