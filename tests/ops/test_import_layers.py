"""The layers of the package: a module imports from its own layer and from those below it, at module level.

An import inside a function may point up, for what is needed only then, but not from a kernel.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOLDERS = {"": "attn_ops", "kernels": "kernels", "meta": "meta", "cpp_serving": "examples/cpp_serving"}
"""Where the modules of ``attn_ops`` and of its packages from other folders are."""

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "argument_checks",
        "errors",
        "version",
        "exports",
        "symbolic_sizes",
        "tracing",
        "gpu",
        "cpp",
        "ops",
        "ops.functions",
        "ops.repeated_plans",
        "ops.tuning_table",
        "eager",
        "policy",
        "native._C",
        "typed",
    ),
    ("plan.state", "ops.options", "eager.extension"),
    ("ops.cuda_kernels",),
    ("ops.unsupported",),
    ("native",),
    ("eager.captured_call", "eager.interposition", "eager.op_entry"),
    ("eager.op_call", "eager.contents"),
    ("eager.op_cache",),
    ("eager.recorded_calls",),
    ("eager.checked_call",),
    ("eager.bound_call",),
    ("eager.prepared_call",),
    ("plan", "meta", "eager.startup", "eager.launches"),
    ("kernels",),
    ("ops.schemas", "ops.fp8_queries", "ops.backends", "ops.checks", "ops.inductor", "flops"),
    ("ops.register",),
    ("plan.planner_base",),
    ("planner", "distributed.sharding_table", "distributed.sharding_agreement", "distributed.sharding_plan"),
    ("distributed.sharding",),
    ("distributed", "sparse_planner"),
    ("plan.resizable", "collect_env", "packaging"),
    ("frontend",),
    ("frontend.call",),
    ("frontend.call_plans",),
    ("frontend.flash.metadata", "frontend.planned_batch", "frontend.shared_plans"),
    ("frontend.engine_attributes", "frontend.one_shot"),
    ("frontend.base", "frontend.cudnn", "frontend.flash", "frontend.sparse_latent", "frontend.trtllm", "frontend.xqa"),
    ("frontend.deepseek",),
    ("frontend.paged",),
    ("frontend.ragged", "frontend.sparse_base"),
    ("frontend.block_sparse", "frontend.variable_block_sparse"),
    ("attention", "cascade", "decode", "flash_attn", "mla", "page", "pod", "prefill", "quantization", "sparse", "xqa"),
    ("", "demo", "cpp_serving"),
    ("integrations.transformers_masks", "integrations.transformers_mla"),
    ("integrations.transformers_refusals",),
    ("integrations",),
)
"""Lowest first. A module is in the layer of its longest prefix here: ``plan.sizing`` in that of ``plan``."""

LAZY = "kernels"
"""The package whose modules the backend table names. They are imported when they are first chosen."""

ARCHITECTURE = (ROOT / "docs/contributing/architecture.md").read_text(encoding="utf-8")


def _files() -> dict[str, Path]:
    """By the name of the module below ``attn_ops``, ``""`` for that itself."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in (file for pattern in ("*.py", "*.pyi") for file in (ROOT / folder).rglob(pattern)):
            parts = (package, *file.relative_to(ROOT / folder).with_suffix("").parts)
            found[".".join(part for part in parts if part not in ("", "__init__"))] = file
    return dict(sorted(found.items()))


FILES = _files()


def _longest_prefix(name: str, known: set[str]) -> str:
    while name not in known and name:
        name = name.rpartition(".")[0]
    return name


def _layer(module: str) -> int:
    of = {prefix: i for i, prefixes in enumerate(LAYERS) for prefix in prefixes}
    prefix = _longest_prefix(module, set(of) - {""})
    assert prefix or not module, f"{module} has no layer: add it to LAYERS"
    return of[prefix]


@cache
def _names(module: str) -> tuple[tuple[str, bool], ...]:
    """Full names that a module imports or that it reaches through ``torch``, and whether inside a function."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{module} has a relative import"
                yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names)
            elif isinstance(child, ast.Attribute):
                yield ast.unparse(child), inside
            lazy = isinstance(child, ast.FunctionDef | ast.Lambda)
            lazy |= isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from walk(child, inside or lazy)

    return tuple(walk(ast.parse(FILES[module].read_text(encoding="utf-8")), inside=False))


def _imports(module: str, lazy: bool) -> set[str]:
    """The modules of ``attn_ops`` that a module imports at module level, and also inside functions if ``lazy``."""
    names = {
        name.removeprefix("attn_ops").lstrip(".")
        for name, inside in _names(module)
        if name.startswith("attn_ops") and lazy >= inside
    }
    return {_longest_prefix(name, set(FILES)) for name in names} - {module}


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_no_layer_above_its_own(module: str) -> None:
    kernel = module.startswith(f"{LAZY}.")
    imported = _imports(module, lazy=kernel)
    assert not {name for name in imported if _layer(name) > _layer(module)}
    assert kernel or not {name for name in imported if name.startswith(f"{LAZY}.")}


def _private_names(tree: ast.AST) -> Iterator[str]:
    """Private parts of PyTorch that a module imports or reaches, up to their first name with an underscore."""
    imported: dict[str, str] = {}  # full names, by the names in the module
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    reached = (ast.unparse(node).partition(".") for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for name in (*imported.values(), *(f"{imported.get(head, head)}.{rest}" for head, _, rest in reached)):
        private = re.match(r"torch\.(?:[a-zA-Z]\w*\.)*_(?!_)\w+", name)
        if private:
            yield private[0]


def test_private_names_are_found() -> None:
    code = """
import torch
import torch.distributed as dist
from torch import _guards
from torch.utils._pytree import tree_map
def f(x): return torch.__version__, torch._C._cuda_getDevice(), dist._symmetric_memory.empty(x), x._version, own._name
"""
    names = {"torch._guards", "torch.utils._pytree", "torch._C", "torch.distributed._symmetric_memory"}
    assert set(_private_names(ast.parse(code))) == names


def test_private_parts_of_pytorch_are_used_where_the_architecture_lists_them() -> None:
    rows = re.findall(r"^\| `(torch\.[\w.]+)` \| .+ \| (.+) \|$", ARCHITECTURE, re.MULTILINE)
    listed = {name: re.findall(r"`([^`]+)`", files) for name, files in rows}
    used: dict[str, set[str]] = {}
    for file in FILES.values():
        for name in _private_names(ast.parse(file.read_text(encoding="utf-8"))):
            used.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    assert listed == {name: sorted(files) for name, files in sorted(used.items())}


def test_the_table_names_modules_that_exist() -> None:
    assert {prefix for prefixes in LAYERS for prefix in prefixes} <= FILES.keys()


def _documented() -> dict[str, int]:
    """The layer of each module and folder in the table of the architecture."""
    rows = re.findall(r"^\| (\d) \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
    named = {name: int(layer) for layer, names in rows for name in re.findall(r"`([^`]+)`", names)}
    return {name.rstrip("/").replace("/", "."): layer for name, layer in named.items()}


def test_the_documented_layers_hold() -> None:
    layers = _documented()
    assert layers.keys() <= FILES.keys()
    of = {module: layers.get(_longest_prefix(module, set(layers))) for module in FILES}
    for module, layer in of.items():
        if not module or module == LAZY or module.startswith(f"{LAZY}."):  # the table says it of kernels in words
            continue
        assert layer is not None, f"{module} has no layer in the table"
        higher = {name for name in _imports(module, lazy=False) if (of[name] or 0) > layer}
        assert not higher, f"{module} is in layer {layer}"
