"""Random valid calls with tree masks of draft tokens, and with items that are scored after one shared prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attn_ops as flashinfer
from helpers.fuzz.batch import Batch, Shape, draw_options, tolerance
from helpers.fuzz.draw import Call, Draw, tensors_of
from helpers.fuzz.oracle import Options, attend_all

TREE_DTYPES = {torch.uint16: torch.int16, torch.int16: torch.int16, torch.uint32: torch.int32, torch.int32: torch.int32}
"""The signed dtype of equal size, by dtype of a tree mask."""


def _call(d: Draw, name: str, batch: Batch, o: Options, run: Callable[[], Any], reads: Any, **more: Any) -> Call:
    """``run`` gives an output of the query's dtype, or a pair of that and its LSE."""
    expected, tolerated = attend_all(batch.requests(), o), tolerance(d, batch.shape, o)
    expected.spread *= 2  # an output that is scaled is rounded before and after

    def check(result: Any) -> None:
        out, lse = result if isinstance(result, tuple) else (result, None)
        assert out.dtype == batch.shape.dtype
        expected.check(out.reshape(expected.out.shape), lse, **tolerated)

    return Call(name, f"{batch}, {o}", run, check, tensors_of(reads), **more)


def tree(d: Draw, rows: int) -> Tensor:
    """bool ``[rows, rows]``: a token sees its ancestors and itself; or, as any mask is allowed, random tokens."""
    if d.chance(0.3):
        return torch.rand((rows, rows), generator=d.generator) < 0.5
    seen = torch.eye(rows, dtype=torch.bool)
    for i in range(1, rows):
        parent = d.integer(-1, i - 1)
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def draw_trees(d: Draw, batch: Batch) -> Tensor:
    """A tree for each request, as words ``[rows, words]``. Bits that stand for no token are set or not."""
    dtype = d.pick(*TREE_DTYPES)
    bits = 8 * dtype.itemsize
    words = max(1, -(-max(batch.qo_lens, default=0) // bits)) + d.pick(0, 0, 1)
    batch.masks, lines = [], [torch.zeros(0, words, dtype=torch.int64)]
    for rows, length in zip(batch.qo_lens, batch.kv_lens, strict=True):
        seen = tree(d, rows)
        mask = torch.ones(rows, length, dtype=torch.bool)
        mask[:, max(length - rows, 0) :] = seen[:, max(rows - length, 0) :]
        batch.masks.append(mask)
        spread = torch.full((rows, words * bits), d.pick(0, 1), dtype=torch.int64)
        spread[:, :rows] = seen
        lines.append((spread.view(rows, words, bits) << torch.arange(bits)).sum(-1))
    return torch.cat(lines).to(TREE_DTYPES[dtype]).view(dtype).to(d.device)


def tree_mask(d: Draw) -> Call:
    name = d.pick("xqa", "xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache")
    shape = Shape.draw(d, same_dims=True)
    o = draw_options(d, shape, "pos_encoding", "rope_scale", "rope_theta", "soft_cap", "causal", "k_scale", "v_scale")
    rows = d.pick(1, 2, 4, 7, 17, 33, None)
    batch = Batch(d, shape, decode=False, rows=rows, max_rows=40, longest=d.by_size(40, 150, 1500))
    mask, table, lens, caches = draw_trees(d, batch), batch.block_tables(), batch.seq_lens, batch.caches()
    if rows is not None and d.chance(0.5):
        mask = mask.view(len(batch.kv_lens), rows, -1)
    if name == "xqa":
        uniform = rows is not None
        leading = (len(batch.kv_lens), 1, rows) if rows is not None and d.chance(0.5) else (batch.rows,)
        o = replace(o, sm_scale=None)
        q = batch.q.reshape(*leading, *batch.q.shape[1:])
        given: dict[str, Any] = {"q_seq_len": rows} if uniform else {"q_cu_seq_lens": batch.qo_indptr()}
        given |= {"mask": mask, "sliding_win_size": o.window_left + 1, "sinks": o.sinks, "kv_layout": shape.kv_layout}
        return _call(
            d, name, batch, o, lambda: flashinfer.xqa(q, *caches, table, lens, **given), (q, caches, table, lens, given)
        )
    scale = d.pick(0.05, 0.2)
    arguments = {
        "query": batch.q,
        "kv_cache": caches,
        "workspace_buffer": None,
        "block_tables": table,
        "seq_lens": lens,
        "max_seq_len": max(1, *batch.kv_lens),
        "bmm1_scale": scale,
        "window_left": o.window_left,
        "kv_layout": shape.kv_layout,
        "sinks": o.sinks,
        "mask": mask,
    }
    if rows is not None:
        arguments["q_len_per_req"] = rows
    else:
        arguments["q_cu_seq_lens" if name.startswith("xqa") else "cum_seq_lens_q"] = batch.qo_indptr()
        if name.startswith("trtllm"):
            arguments["max_q_len"] = max(1, *batch.qo_lens)
    function, exact = getattr(flashinfer, name), replace(o, sm_scale=scale)
    return _call(d, name, batch, exact, lambda: function(**arguments), arguments)


def draw_items(d: Draw, batch: Batch) -> dict[str, Tensor | int]:
    """Items behind a prefix for each request: a delimiter, and tokens that see the prefix and one another causally."""
    batch.qo_lens = [min(n, m) for n, m in zip(batch.qo_lens, batch.kv_lens, strict=True)]
    batch.q_rows = [q[:n] for q, n in zip(batch.q_rows, batch.qo_lens, strict=True)]
    prefixes, places = [], []
    batch.masks = []
    for rows, length in zip(batch.qo_lens, batch.kv_lens, strict=True):
        prefix = d.pick(length, d.integer(0, length), d.integer(0, length))
        place = list[int]()
        while len(place) < length - prefix:
            place += range(min(d.pick(1, 2, 5, d.integer(1, 40)), length - prefix - len(place)))
        begin = torch.tensor([0] * prefix + [prefix + i - p for i, p in enumerate(place)], dtype=torch.int64)
        row, key = torch.arange(length)[:, None], torch.arange(length)
        behind = (row >= prefix) & (key >= prefix)
        seen = (key <= row) & (~behind | (key > begin[:, None]))
        batch.masks.append(seen[length - rows :])
        prefixes.append(prefix)
        places.append(place)
    width = max(map(len, places)) + d.pick(0, 0, 3)
    padded = torch.tensor([p + [0] * (width - len(p)) for p in places]).flatten()
    return {
        "prefix_len_ptr": torch.tensor(prefixes).to(d.device, d.pick(torch.uint32, torch.int32)),
        "token_pos_in_items_ptr": padded.to(d.device, d.pick(torch.uint16, torch.int32)),
        "token_pos_in_items_len": 0 if len(places) == 1 and d.chance(0.5) else width,
        "max_item_len_ptr": torch.tensor([max(p, default=0) for p in places]).to(torch.uint16),
    }


def multi_item_mask(d: Draw) -> Call:
    shape, paged = Shape.draw(d), d.chance(0.5)
    o = replace(draw_options(d, shape, "k_scale", "v_scale"), causal=True)
    batch = Batch(d, shape, decode=False, longest=d.by_size(40, 150, 1500))
    assert batch.pages is not None
    items = draw_items(d, batch)
    workspace = torch.zeros(1 << (27 if d.device == "cuda" else 20), dtype=torch.uint8, device=d.device)
    options: dict[str, Any] = {
        "pos_encoding_mode": o.pos_encoding,
        "window_left": o.window_left,
        "sm_scale": o.sm_scale,
    }
    options |= {"rope_scale": o.rope_scale, "rope_theta": o.rope_theta} if o.pos_encoding == "ROPE_LLAMA" else {}
    options |= {"logits_soft_cap": o.soft_cap or None, "q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}
    wrapper: Any
    tables: tuple[Tensor, ...]
    if paged:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, shape.kv_layout)
        tables = (batch.qo_indptr(), *batch.page_table(wide=False))
        kv: tuple[Any, ...] = (batch.caches(),)
        sizes: tuple[int, ...] = (*shape.heads, shape.dims[0], shape.page_size, shape.dims[1])
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, shape.kv_layout)
        tables, kv = (batch.qo_indptr(), batch.kv_indptr()), batch.ragged()
        sizes = (*shape.heads, *shape.dims)
    q = batch.q
    return _call(
        d,
        f"{'paged' if paged else 'ragged'} items",
        batch,
        o,
        lambda: wrapper.run(q, *kv, sinks=o.sinks, return_lse=True),
        (q, kv, items, o.sinks),
        prepare=lambda: wrapper.plan(*tables, *sizes, causal=True, **options, **items),
    )


MASK_CALLS: dict[str, Callable[[Draw], Call]] = {"tree mask": tree_mask, "multi-item mask": multi_item_mask}
