"""Packages import each other in one direction; `import attn_ops` only defines operators."""

import ast
import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = (
    "triton",
    "flashinfer",
    "vllm_flash_attn",
    "vllm",
    "flash_attn",
    "xformers",
    "transformers",
    "numba",
)
OPERATORS = (
    "advance_step",
    "attention",
    "attention_with_lse",
    "copy_blocks",
    "gather_kv",
    "merge_attn_states",
    "mla_attention",
    "slot_mapping",
    "swap_blocks",
    "write_kv",
    "write_mla_kv",
)
ALLOWED = {
    "attn_ops": {"attn_ops"},
    "fx_passes": {"attn_ops", "fx_passes"},
    "graphs": {"attn_ops", "fx_passes", "graphs"},
}


def imported_packages(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere, functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_import_direction(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        ours = imported_packages(path) & set(ALLOWED)
        assert ours <= ALLOWED[package], (
            f"{path.relative_to(ROOT)} imports {sorted(ours - ALLOWED[package])}"
        )


def modules() -> dict[str, Path]:
    """Product modules by name."""
    files = [f for package in ALLOWED for f in sorted((ROOT / package).rglob("*.py"))]
    return {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
        for f in files
    }


def imported_modules(name: str, path: Path, known: set[str]) -> set[str]:
    """Ours that a module imports anywhere: in functions and under TYPE_CHECKING too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {n for n in names & known if n != name and not name.startswith(n + ".")}


def test_no_module_imports_what_imports_it():
    files = modules()
    known = set(files)
    edges = {name: imported_modules(name, path, known) for name, path in files.items()}

    def reached(name: str) -> set[str]:
        seen, pending = set(), [*edges[name]]
        while pending:
            module = pending.pop()
            if module not in seen:
                seen.add(module)
                pending += edges[module]
        return seen

    assert sorted(name for name in files if name in reached(name)) == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "docs"])
def test_other_files_are_small_too(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert {name: number for name, number in lines.items() if number > 600} == {}


def test_files_and_folders_are_small():
    folders: dict[str, int] = {}
    for path in modules().values():
        lines = path.read_text().count("\n")
        limit = 800 if "triton" in path.parts else 600
        assert lines <= limit, f"{path.relative_to(ROOT)} has {lines} lines"
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(ROOT))
            folders[folder] = folders.get(folder, 0) + 1
    assert {f: n for f, n in folders.items() if n > 20} == {}
    assert folders["graphs"] <= 13


MAKERS = {"ContextVar", "Library", "Lock", "RLock", "WeakKeyDictionary", "WeakSet", "local"}
"""Calls whose results are there to be changed."""

CHANGES = {"append", "add", "clear", "extend", "insert", "pop", "popleft", "setdefault", "update"}


def changed_names(tree: ast.Module) -> set[str]:
    """Names and attributes whose values a module changes: items, methods, `global`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        target = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            target = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in CHANGES else None
        while isinstance(target, (ast.Call, ast.Subscript)):  # d.setdefault(k, []).append(x)
            target = getattr(target, "func", None) or getattr(target, "value", None)
            target = target.value if isinstance(target, ast.Attribute) else target
        if isinstance(target, (ast.Name, ast.Attribute)):
            found.add(target.id if isinstance(target, ast.Name) else target.attr)
    return found


def state_of(body: list[ast.stmt], changed: set[str]) -> Iterator[tuple[str, str]]:
    """Mutable state of modules and classes, and the docstring that follows it."""
    for node, behind in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(node, ast.ClassDef):
            yield from state_of(node.body, changed)
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        name, value = ast.unparse(target), node.value
        maker = value.func if isinstance(value, ast.Call) else None
        kind = ast.unparse(maker).split(".")[-1] if maker else ""
        fixed = kind == "field" or isinstance(value, ast.Tuple)
        if kind in MAKERS or (name in changed and not fixed):
            doc = behind.value if isinstance(behind, ast.Expr) else None
            yield name, str(doc.value) if isinstance(doc, ast.Constant) else ""


def test_mutable_state_of_a_module_says_why_it_is_global():
    unsaid, known = [], set()
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        for variable, doc in state_of(tree.body, changed_names(tree)):
            known.add(f"{name}.{variable}")
            if "Global" not in doc:
                unsaid.append(f"{name}.{variable}")
    assert unsaid == []
    assert {"attn_ops.backends.registry._registered", "fx_passes.pipeline._PIPELINE"} <= known
    assert len(known) <= 16, sorted(known)


def test_caches_say_what_they_save():
    """In a comment above the decorator that begins with `Cached:`."""
    found = 0
    for name, path in modules().items():
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.lstrip().startswith(("@functools.cache", "@functools.lru_cache")):
                found += 1
                above = lines[number - 1]
                assert above.lstrip().startswith("# Cached: "), f"{name}:{number + 1}"
    assert found


@pytest.mark.parametrize("package", ALLOWED)
def test_kernel_libraries_are_not_imported_at_module_level(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.parent.name == "triton" and path.name != "__init__.py":
            continue  # kernels; the package imports them in its first forward
        if path.parent == ROOT / "graphs" / "integrations":
            continue  # each is imported by those who have its package
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            heavy = [n for n in names if n.split(".")[0] in HEAVY]
            assert not heavy, f"{path.relative_to(ROOT)} imports {heavy} when it is imported"


def in_a_new_process(code: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_attn_ops_imports_no_kernels_and_changes_no_config():
    modules = f"[n for n in {HEAVY} if n in sys.modules]"
    code = f"""
import json, logging, sys, torch
import torch._dynamo.config, torch._functorch.config, torch._inductor.config
import torch.fx.experimental._config as shapes_config
configs = [torch._dynamo.config, torch._functorch.config, torch._inductor.config, shapes_config]

def state():
    flags = [torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()]
    flags += [torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()]
    flags += [torch.are_deterministic_algorithms_enabled(), sys.gettrace()]
    flags += [sorted(torch._dynamo.list_backends(exclude_tags=()))]
    values = [sorted(c.get_config_copy().items(), key=lambda kv: kv[0]) for c in configs]
    return repr(flags + values)

known, attention = set(sys.modules), torch.nn.functional.scaled_dot_product_attention
before = state()
modules_before = {modules}
warnings = logging.Handler(logging.WARNING)
said = []
warnings.emit = lambda record: said.append(record.getMessage())
logging.getLogger("torch").addHandler(warnings)
import attn_ops
assert said == [], said
assert state() == before, "the import changed torch's configuration"
assert torch.nn.functional.scaled_dot_product_attention is attention
print(json.dumps({{
    "heavy": sorted(set({modules}) - set(modules_before)),
    "ops": [n for n in {OPERATORS} if hasattr(torch.ops.attn_ops, n)],
    "ours": [n for n in sys.modules if n.split(".")[0] in ("fx_passes", "graphs")],
}}))
"""
    after = in_a_new_process(code)
    assert after == {"heavy": [], "ops": list(OPERATORS), "ours": []}
    added = f"print(json.dumps(sorted(set({modules}) - set(before))))"
    assert (
        in_a_new_process(f"import json, sys, torch; before = {modules}; import attn_ops; {added}")
        == []
    )


def test_slow_tests_exist():
    """A test of another name is quick again."""
    for line in (ROOT / "tests" / "slow_tests.txt").read_text().splitlines():
        path, _, name = line.partition("::")
        text = (ROOT / path).read_text()
        assert not name or f"def {name.split('[')[0].split('::')[-1]}(" in text, line


@pytest.mark.parametrize("package", ALLOWED)
def test_every_public_name_is_there(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
