"""Host functions of the Triton backend are annotated. mypy cannot check this: it exempts whole modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.syntax_trees import name_of

FOLDER = Path(__file__).parents[2] / "kernels" / "triton"
DEVICE_DECORATORS = frozenset({"jit", "constexpr_function"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


def host_functions(tree: ast.AST) -> Iterator[Function]:
    """All functions of ``tree`` but those that Triton compiles, and what lies in them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function) and DEVICE_DECORATORS.intersection(map(name_of, node.decorator_list)):
            continue
        if isinstance(node, Function):
            yield node
        yield from host_functions(node)


def unannotated(function: Function) -> list[str]:
    """Names of parameters without an annotation, and ``return``."""
    a = function.args
    optional = [x for x in (a.vararg, a.kwarg) if x is not None]
    names = [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, *optional) if x.annotation is None]
    return [name for name in names if name not in ("self", "cls")] + ["return"] * (function.returns is None)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_host_functions_are_annotated(path: Path) -> None:
    functions = host_functions(ast.parse(path.read_text(encoding="utf-8")))
    missing = {f"{path.name}:{f.lineno} {f.name}": names for f in functions if (names := unannotated(f))}
    assert not missing


def test_device_functions_alone_are_exempt() -> None:
    functions = (
        "@triton.jit(x=1)\ndef device(a): ...",
        "def host(a, *, b: int, **c): ...",
        "def typed(a: int) -> None: ...",
    )
    found = {function.name: unannotated(function) for function in host_functions(ast.parse("\n".join(functions)))}
    assert found == {"host": ["a", "c", "return"], "typed": []}
