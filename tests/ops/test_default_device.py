"""Tensors of the library are on the devices of its arguments, whatever device PyTorch creates tensors on by default."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import attn_ops
from attn_ops import flash_attn

ROOT = Path(attn_ops.__file__).parent
FACTORIES = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "tensor", "zeros"}
BY_DEFAULT = {("flash/scheduler.py", "empty")}
"""Those that are to be on the default device."""


@pytest.fixture
def other_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)  # a device would leave a mode, which every call then passes through


def _on_the_cpu(result: Any) -> list[list[float]]:
    tensors = [result] if isinstance(result, Tensor) else list(result)
    assert {t.device.type for t in tensors} == {"cpu"}
    return [t.flatten().tolist() for t in tensors]


def _decode(options: dict[str, Any]) -> Any:
    """Pages out of order, and a request without keys."""
    generator = torch.Generator("cpu").manual_seed(0)
    q = torch.randn(3, 4, 16, generator=generator, device="cpu")
    k, v = torch.randn(2, 9, 4, 2, 16, generator=generator, device="cpu")
    sizes = {"page_size": 4, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    planner = attn_ops.DecodePlanner(3, 9, **sizes, device="cpu")
    table = [torch.tensor(t, device="cpu") for t in ([0, 3, 3, 4], [7, 2, 5, 0], [2, 0, 4])]
    plan = planner.plan(*table)
    return torch.ops.attn.batch_decode(q, k, v, plan, planner.workspace, return_lse=True, **options)


def _single(options: dict[str, Any]) -> Any:
    q, kv = (torch.linspace(-1, 1, n * 32, device="cpu").view(n, 2, 16) for n in (5, 7))
    return torch.ops.attn.single_prefill(q, kv, kv, return_lse=True, **options)


def _kvcache(**arguments: Any) -> Any:
    q, cache = (torch.linspace(-1, 1, n * 32, device="cpu").view(2, -1, 2, 8) for n in (2, 16))
    lengths = torch.tensor([3, 6], device="cpu")
    given = {name: torch.tensor(value, device="cpu") for name, value in arguments.items()}
    if "block_table" in given:
        cache = cache.view(8, 4, 2, 8)
    return flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, **given)


def _block_sparse() -> Any:
    planner = attn_ops.BlockSparsePlanner(
        8, 8, 4, 4, num_qo_heads=2, num_kv_heads=2, head_dim=16, max_blocks=4, device="cpu"
    )
    plan = planner.plan(torch.tensor([0, 1, 3], device="cpu"), torch.tensor([1, 0, 1], device="cpu"))
    x = torch.linspace(-1, 1, 256, device="cpu").view(8, 2, 16)
    return torch.ops.attn.block_sparse_prefill(x, x, x, plan, planner.workspace, return_lse=True)


def _cudnn() -> Any:
    q, cache = torch.ones(2, 2, 16, device="cpu"), torch.ones(4, 2, 4, 16, device="cpu")
    return attn_ops.cudnn_batch_decode_with_kv_cache(
        q,
        cache,
        cache,
        0.25,
        torch.empty(1 << 16, dtype=torch.uint8, device="cpu"),
        max_sequence_kv=8,
        actual_seq_lens_kv=torch.tensor([3, 6], dtype=torch.int32, device="cpu"),
        block_tables=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="cpu"),
        batch_offsets_q=torch.tensor([0, 32, 64], dtype=torch.int32, device="cpu"),
    )


def _flops() -> Any:
    with FlopCounterMode(display=False) as counter:
        _single({"window_left": 2})
    return torch.tensor(float(counter.get_total_flops()), device="cpu")


CALLS: dict[str, Callable[[], Any]] = {
    "decode": lambda: _decode({"backend": "reference"}),
    "decode, window": lambda: _decode({"backend": "cpu", "window_left": 3}),
    "prefill, windows": lambda: _single({"backend": "cpu", "window_left": 2, "window_right": 1}),
    "block table": lambda: _kvcache(block_table=[[3, 0], [2, 1]]),
    "batch indices": lambda: _kvcache(cache_batch_idx=[1, 0]),
    "padding": lambda: _kvcache(cache_leftpad=[1, 2]),
    "block sparse": _block_sparse,
    "offsets": _cudnn,
    "flops": _flops,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_on_the_cpu(name: str, request: pytest.FixtureRequest) -> None:
    expected = _on_the_cpu(CALLS[name]())
    request.getfixturevalue("other_default")
    assert _on_the_cpu(CALLS[name]()) == expected


def _without_device(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES:
            module, names = node.func.value, [k.arg for k in node.keywords]
            if isinstance(module, ast.Name) and module.id == "torch" and not {"device", None} & {*names}:
                yield node


def test_every_new_tensor_names_its_device() -> None:
    folders = [ROOT, *map(Path, (*attn_ops.kernels.__path__, *attn_ops.meta.__path__))]
    files = {path for folder in folders for path in folder.rglob("*.py") if "demo" not in path.parts}
    found = [
        f"{path}:{call.lineno}"
        for path in sorted(files)
        for call in _without_device(ast.parse(path.read_text()))
        if not any(str(path).endswith(file) and call.func.attr == name for file, name in BY_DEFAULT)  # type: ignore[attr-defined]
    ]
    assert len(files) > 150
    assert found == []
