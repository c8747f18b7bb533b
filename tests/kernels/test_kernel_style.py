"""Kernels say how they are launched and what they do, and stay below a number of parameters."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from helpers.syntax_trees import name_of

from attn_ops.kernels.cuda.build import specializations

FOLDER = Path(__file__).parents[2] / "kernels" / "triton"
MAX_PARAMETERS = 40
BARRIERS = frozenset({"debug_barrier", "allocate_barriers", "warp_specialize"})


def kernels(source: str) -> list[ast.FunctionDef]:
    """The functions that Triton compiles and the host launches."""
    return [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and "jit" in map(name_of, node.decorator_list)
    ]


def missing(kernel: ast.FunctionDef) -> list[str]:
    """What the docstring of a kernel lacks, and a number of parameters that is too large."""
    text = ast.get_docstring(kernel) or ""
    loops = any(
        isinstance(node, ast.While) or (isinstance(node, ast.For) and name_of(node.iter) == "range")
        for node in ast.walk(kernel)
    )
    barriers = any(isinstance(node, ast.Call) and name_of(node) in BARRIERS for node in ast.walk(kernel))
    required = [
        ("Grid: the programs of a launch", r"\AGrid: "),
        ("Owns: what a program computes", r"\b[Oo]wns\b"),
        ("Loop invariant: what holds before each iteration", r"^Loop invariant: " if loops else ""),
        ("Barriers: which, and for what", r"^Barriers?: " if barriers else ""),
        ("Bound by: what limits its speed", r"^Bound by\b"),
    ]
    found = [part for part, pattern in required if not re.search(pattern, text, re.MULTILINE)]
    a = kernel.args
    count = len([*a.posonlyargs, *a.args, *a.kwonlyargs])
    return found + [f"{count} parameters, at most {MAX_PARAMETERS}"] * (count > MAX_PARAMETERS)


CUDA = FOLDER.parent / "cuda"


@pytest.mark.parametrize("path", sorted(CUDA.glob("*.cu*h")) + sorted(CUDA.glob("*.cu")), ids=lambda path: path.name)
def test_cuda_sources_have_at_most_120_columns(path: Path) -> None:
    assert [line for line in path.read_text(encoding="utf-8").splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_kernels_have_docstrings_and_few_parameters(path: Path) -> None:
    found = {kernel.name: missing(kernel) for kernel in kernels(path.read_text(encoding="utf-8"))}
    assert not {name: parts for name, parts in found.items() if parts}


def cuda_kernels(source: str) -> dict[str, str]:
    """The comment before each function that the host launches, by the function's name."""
    found = re.findall(r"((?:^//.*\n)*)extern \"C\" __global__[^(]*(?:\([^)]*\)\s*)?\b(\w+)\(", source, re.MULTILINE)
    return {name: re.sub(r"^// ?", "", comment, flags=re.MULTILINE) for comment, name in found}


@pytest.mark.parametrize("path", sorted((FOLDER.parent / "cuda").glob("*.cu")), ids=lambda path: path.stem)
def test_cuda_kernels_have_comments(path: Path) -> None:
    found = cuda_kernels(path.read_text(encoding="utf-8"))
    assert found
    for name, comment in found.items():
        for part in (r"\AGrid: ", r"^Owns: ", r"^Bound by: "):
            assert re.search(part, comment, re.MULTILINE), f"the comment of {name} has no {part}"


def test_cuda_kernels_have_few_parameters() -> None:
    """``tests/kernels/test_cuda_launch.py`` compares these parameters with those of the source."""
    pytest.importorskip("triton")  # whose kernel combines partial results
    for one in specializations():
        assert len(one.kernel.parameters) <= MAX_PARAMETERS, one.name


def test_what_is_missing_is_found() -> None:
    kernel = """
@triton.jit(do_not_specialize=["n"])
def copy_kernel(x, n):
    '''Grid: (blocks).

    A program owns a block.
    Bound by memory bandwidth.
    '''
    for i in range(n):
        tl.debug_barrier()
"""
    (found,) = kernels(kernel)
    assert [part.partition(":")[0] for part in missing(found)] == ["Loop invariant", "Barriers"]
    assert kernels(kernel.replace("copy_kernel", "copy")) == []
    parameters = ", ".join(f"a{i}" for i in range(MAX_PARAMETERS + 1))
    (found,) = kernels(f"@triton.jit\ndef wide_kernel({parameters}): ...")
    assert missing(found)[-1] == "41 parameters, at most 40"
    assert len(missing(found)) == 4
