"""Calls compile to whole graphs under ``torch.set_default_device``, a mode that Dynamo traces through.

Dynamo cannot trace methods of tensors that call ``super()`` under such a mode.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.mla_requests import Latents
from helpers.surfaces import SURFACES
from helpers.surfaces.base import Raises, Surface
from helpers.wrapper_requests import DEVICE, Requests, int32, workspace
from torch import Tensor
from torch.utils import _pytree as pytree

import attn_ops
from attn_ops import flash_attn

ROOT = Path(attn_ops.__file__).parent


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, torch.float16)


def _of_surface(surface: Surface) -> Callable[[], Any]:
    """Its base call, with an LSE and with buffers for the results where the call has them."""
    *earlier, last = surface.stages
    given = surface.effects.get(last, {})
    buffers = {name: given[name] for name in ("return_lse", "out", "lse") if name in given}
    buffers = {name: value for name, value in buffers.items() if not isinstance(value, Raises)}
    arguments = {**surface.stages[last], **buffers}
    if last == "call":
        return lambda: surface.make(**arguments)
    wrapper = surface.make(**surface.stages["init"])
    for stage in earlier[1:]:
        getattr(wrapper, surface.methods.get(stage, stage))(**surface.stages[stage])
    return lambda: getattr(wrapper, surface.methods.get(last, last))(**arguments)


def _functions() -> dict[str, Callable[[], Any]]:
    """Calls of FlashAttention's functions: over dense and ragged tensors, and over a paged cache."""
    q, k, v = _random(2, 3, 4, 64), _random(2, 9, 2, 64), _random(2, 9, 2, 64)
    rows = [t.flatten(0, 1) for t in (q, k, v)]
    lengths = int32(0, 3, 6), int32(0, 9, 18), 3, 9
    cache = _random(8, 16, 2, 64), _random(8, 16, 2, 64)
    new = _random(2, 3, 2, 64), _random(2, 3, 2, 64), torch.rand(64, 16).to(DEVICE), torch.rand(64, 16).to(DEVICE)
    tables: dict[str, Any] = {"block_table": int32(*range(8)).view(2, 4), "cache_seqlens": int32(30, 50)}
    latents, qv = _random(8, 16, 1, 128), _random(2, 3, 4, 64)
    parts = _random(3, 2, 5, 4, 64), _random(3, 2, 5, 4).float()
    lse = {"return_softmax_lse": True}
    over_cache = flash_attn.flash_attn_with_kvcache
    return {
        "flash func": lambda: flash_attn.flash_attn_func(q, k, v, causal=True, **lse),
        "flash func, qv": lambda: flash_attn.flash_attn_func(q, k, v, qv=q, **lse),
        "flash func, chunks": lambda: flash_attn.flash_attn_func(q, k, v, causal=True, attention_chunk=4, **lse),
        "flash qkvpacked": lambda: flash_attn.flash_attn_qkvpacked_func(torch.cat((q, q), 2), num_heads_q=4, **lse),
        "flash varlen": lambda: flash_attn.flash_attn_varlen_func(*rows, *lengths, **lse),
        "flash decode": lambda: over_cache(q[:, :1], *cache, **tables, **lse),
        "flash append": lambda: over_cache(q, *cache, *new, **tables, causal=True, **lse),
        "flash append, halves": lambda: over_cache(q, *cache, *new, **tables, causal=True, rotary_interleaved=False),
        "flash latents": lambda: over_cache(q, latents[..., 64:], latents[..., :64], qv=qv, **tables, **lse),
        "flash combine": lambda: flash_attn.flash_attn_combine(*parts),
    }


def _tables_of_heads() -> Callable[[], Any]:
    r = Requests(kv_layout="HND")
    tables = {"block_tables": r.block_tables().expand(2, -1, -1), "seq_lens": r.seq_lens.expand(2, -1)}
    options = {"max_seq_len": 130, "bmm1_scale": 0.125, "return_lse": True, "enable_block_sparse_attention": True}
    return lambda: attn_ops.trtllm_batch_decode_with_kv_cache(r.q, r.cache(), None, **tables, **options)


def _scales_of_latents() -> Callable[[], Any]:
    m = Latents(dims=(256, 16), kv_dtype=torch.float8_e4m3fn)
    wrapper = attn_ops.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(m.qo_indptr, *m.table, 3, 256, 16, 16, True, 0.1, torch.float16, torch.float8_e4m3fn)
    scales = torch.full((*m.cache.shape[:2], 2), 0.5, device=DEVICE)
    tensors = *m.split(m.q), *m.split(m.cache)
    return lambda: wrapper.run(*tensors, ckv_scale_arr=scales, kpe_scale=2.0)


def _flat_latents() -> Callable[[], Any]:
    m = Latents(((1, 70), (1, 9)))
    flat = m.cache.flatten(0, 1)
    tables = m.block_tables, m.table[2]
    return lambda: attn_ops.xqa_mla(m.q, flat, flat[:, :64], *tables, page_size=16)


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    **{s.name: functools.partial(_of_surface, s) for s in SURFACES if not s.name.endswith(", 0.1")},
    **{name: lambda call=call: call for name, call in _functions().items()},
    "tables of heads": _tables_of_heads,
    "scales of latents": _scales_of_latents,
    "flat latents": _flat_latents,
}


@pytest.fixture
def default_device() -> Iterator[Callable[[str], None]]:
    yield torch.set_default_device
    torch.set_default_device(None)  # a device would leave a mode, which every call then passes through


@pytest.mark.parametrize("name", CALLS)
def test_calls_compile(name: str, default_device: Callable[[str], None]) -> None:
    """No tensor is on the default device, which has no data here."""
    call = CALLS[name]()
    expected = pytree.tree_map(torch.clone, call())
    default_device("meta")
    actual = torch.compile(call, fullgraph=True, backend="eager")()
    torch.testing.assert_close(actual, expected, equal_nan=True)


def _calls_unflatten(node: ast.AST) -> bool:
    """Whether ``node`` calls the one method of tensors that calls ``super()``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "unflatten":
        return False
    return not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch")


def test_no_method_that_calls_super() -> None:
    """The function ``torch.unflatten`` is traced."""
    paths = sorted(ROOT.rglob("*.py"))
    nodes = [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    assert len(paths) > 100
    assert [f"{path}:{node.lineno}" for path, node in nodes if _calls_unflatten(node)] == []  # type: ignore[attr-defined]
