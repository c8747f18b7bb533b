"""Random valid calls of every op of ``torch.ops.attn``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attn_ops
from helpers.fuzz.batch import FP8, Batch, Shape, draw_options, draw_prefill_options, tolerance
from helpers.fuzz.draw import Call, Draw
from helpers.fuzz.oracle import Options, Request, attend_all, merge
from helpers.fuzz.rounding import check_rounded
from helpers.fuzz.sparse import SPARSE_OPS
from helpers.oracle import Expected

ops = torch.ops.attn

COUNTERS = ("split_counters", "queue")
"""Fields of plans that a call writes, and leaves at 0."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def op_options(op: str, o: Options, shape: Shape, d: Draw, mask: Tensor | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "sm_scale": o.sm_scale,
        "logits_soft_cap": o.soft_cap,
        "window_left": o.window_left,
        "sinks": o.sinks,
    }
    if shape.is_fp8 and ((o.k_scale, o.v_scale) != (1.0, 1.0) or d.chance(0.5)):
        options["kv_scale"] = torch.tensor([o.k_scale, o.v_scale], device=d.device)
    if op != "batch_mla":
        options |= {"pos_encoding": o.pos_encoding, "rope_scale": o.rope_scale, "rope_theta": o.rope_theta}
        options["kv_layout"] = shape.kv_layout
    if op != "batch_decode":
        options["causal"] = o.causal
    if op not in ("batch_decode", "batch_mla"):
        options["window_right"] = o.window_right
    if mask is not None:
        options["mask"] = mask
    return options


def tensors_of(*found: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]


def attention_call(
    d: Draw, op: str, arguments: dict[str, Any], expected: Expected, shape: Shape, o: Options, text: str, **more: Any
) -> Call:
    arguments = {**arguments, "backend": d.backend, "return_lse": d.chance(0.8)}
    # Triton's interpreter rounds to FP8 without a carry into the exponent: 0.49 becomes 0.25.
    fp8 = () if d.backend == "interpreter" else FP8
    out_dtype = arguments["out_dtype"] = d.pick(None, None, None, *FLOATS, *fp8)
    text, tolerated = f"{text}, out_dtype={out_dtype}", tolerance(d, shape, o)

    def run() -> Any:
        return getattr(ops, op)(**arguments)

    def check(result: tuple[Tensor, Tensor]) -> None:
        out, lse = result
        assert out.dtype == (out_dtype or shape.dtype)
        assert out.is_contiguous()
        sums = lse if arguments["return_lse"] else None
        if sums is None:
            assert lse.shape == (0,)
        if out_dtype is None:
            expected.check(out, sums, **tolerated)
        else:
            check_rounded(expected, out, sums, shape.dtype, **tolerated)

    writes = tensors_of(arguments.get("workspace"))
    plan = arguments.get("plan")
    counters = [getattr(plan, name, None) for name in COUNTERS]
    reads = [t for t in tensors_of(arguments) if all(t is not one for one in counters)]
    return Call(op, text, run, check, reads, writes, **more)


def poison_plan(planner: Any) -> None:
    """No part of an earlier plan may remain in use."""
    for t in planner.state:
        t.fill_(1000)
    planner.workspace.fill_(math.nan)


def _earlier_plans(d: Draw, plan: Callable[[Batch], None], draw: Callable[[], Batch]) -> None:
    for _ in range(d.pick(0, 0, 1, 2)):
        plan(draw())


def batch_decode(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_options(d, shape, "causal")
    batch, padding = Batch(d, shape), d.pick(0, 0, 2)
    fixed = d.chance(0.2)
    planner = attn_ops.DecodePlanner(
        max_batch=len(batch.kv_lens) + padding + d.pick(0, 3),
        max_pages=max(1, sum(map(len, batch.pages)) + d.pick(2, 9)),
        page_size=shape.page_size,
        num_qo_heads=shape.heads[0],
        num_kv_heads=shape.heads[1],
        head_dim=shape.dims[0],
        head_dim_vo=shape.dims[1],
        max_kv_len=d.pick(None, max(1, *batch.kv_lens)),
        window_left=o.window_left if d.chance(0.4) else -1,
        num_ctas=d.pick(None, 1, 3, 16, 40),
        fixed_split_size=d.pick(1, 4, 16) if fixed else None,
        cache_pages=d.pick(None, batch.num_pages),
        device=d.device,
    )
    if d.chance(0.3):  # another batch before, in the same tensors
        planner.plan(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.tensor([1]))
    poison_plan(planner)
    plan = planner.plan(*batch.page_table(host=True))
    queries = torch.cat([*batch.q_rows, torch.zeros(padding, *batch.q_rows[0].shape[1:], dtype=shape.dtype)])
    caches = batch.caches() if d.chance(0.6) or shape.dims[0] != shape.dims[1] else tuple(batch.stacked().unbind(1))
    arguments = {
        "q": d.place(queries),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "plan": plan,
        "workspace": planner.workspace,
        **op_options("batch_decode", o, shape, d),
    }
    text = f"{batch}, {o}, padding={padding}, fixed={fixed}"
    return attention_call(d, "batch_decode", arguments, batch.expected(o, padding), shape, o, text)


def _prefill(d: Draw, op: str) -> Call:
    ragged = op == "ragged_prefill"
    shape = Shape.draw(d)
    o = draw_prefill_options(d, shape)
    batch, padding = Batch(d, shape, decode=False), d.pick(0, 0, 2)
    if not ragged:
        assert batch.pages is not None
    mask = None
    if d.chance(0.25):
        batch.draw_masks()
        mask = batch.packed_masks()
        if not len(mask):
            mask = torch.zeros(1, dtype=torch.uint8, device=d.device)
    planned_causal = o.causal and mask is None and d.chance(0.5)
    fixed = d.pick(4, 64) if d.chance(0.15) else None
    planner = attn_ops.PrefillPlanner(
        max_batch=len(batch.kv_lens) + d.pick(0, 3),
        max_tokens=max(1, batch.rows + d.pick(0, 5)),
        max_pages=0 if ragged else max(1, sum(map(len, batch.pages)) + d.pick(2, 9)),
        page_size=1 if ragged else shape.page_size,
        num_qo_heads=shape.heads[0],
        num_kv_heads=shape.heads[1],
        head_dim=shape.dims[0],
        head_dim_vo=shape.dims[1],
        max_kv_len=max(1, *batch.kv_lens) + d.pick(0, 100) if ragged else d.pick(None, max(1, *batch.kv_lens)),
        causal=planned_causal,
        window_left=o.window_left if d.chance(0.4) else -1,
        window_right=o.window_right if d.chance(0.4) else -1,
        tile_rows=d.pick(None, None, 1, 3, 16, 64),
        num_ctas=None if fixed else d.pick(None, None, 1, 12, 60),
        fixed_split_size=fixed,
        device=d.device,
    )
    poison_plan(planner)
    dtype = d.pick(torch.int32, torch.int64)
    qo_indptr = batch.qo_indptr(dtype, d.pick("cpu", d.device))
    if ragged:
        plan = planner.plan(qo_indptr, batch.kv_indptr(qo_indptr.dtype, str(qo_indptr.device)))
        kv = dict(zip(("k", "v"), batch.ragged(), strict=True))
    else:
        indptr = (t.to(qo_indptr.device, qo_indptr.dtype) for t in batch.page_table())
        plan = planner.plan(qo_indptr, *indptr)
        kv = dict(zip(("k_cache", "v_cache"), batch.caches(), strict=True))
    queries = torch.cat([*batch.q_rows, torch.zeros(padding, *batch.q_rows[0].shape[1:], dtype=shape.dtype)])
    arguments = {
        "q": d.place(queries),
        **kv,
        "plan": plan,
        "workspace": planner.workspace,
        **op_options(op, o, shape, d, mask),
    }
    requests = attend_all(batch.requests(), o, padding)
    text = f"{batch}, {o}, padding={padding}, masked={mask is not None}, planned_causal={planned_causal}"
    return attention_call(d, op, arguments, requests, shape, o, text)


def batch_prefill(d: Draw) -> Call:
    return _prefill(d, "batch_prefill")


def ragged_prefill(d: Draw) -> Call:
    return _prefill(d, "ragged_prefill")


def single_prefill(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_prefill_options(d, shape)
    batch = Batch(d, shape, decode=False, requests=1)
    mask = None
    if d.chance(0.25):
        batch.draw_masks()
        mask = batch.packed_masks()
    k, v = batch.ragged()
    arguments = {"q": batch.q, "k": k, "v": v, **op_options("single_prefill", o, shape, d, mask)}
    text = f"{batch}, {o}, masked={mask is not None}"
    return attention_call(d, "single_prefill", arguments, attend_all(batch.requests(), o), shape, o, text)


def batch_mla(d: Draw) -> Call:
    shape = Shape.draw(d, mla=True)
    o = draw_options(d, shape, "pos_encoding", "rope_scale", "rope_theta")
    (width, ckv), (heads, _) = shape.dims, shape.heads
    batch = Batch(d, shape, decode=d.chance(0.5), max_rows=8, longest=d.by_size(40, 150, 700))
    assert batch.pages is not None
    latent_values(batch)
    if o.sm_scale is None and width != 576:
        o = Options(**{**vars(o), "sm_scale": 0.2})
    exact = Options(**{**vars(o), "sm_scale": 1 / math.sqrt(192)}) if o.sm_scale is None else o
    planner = attn_ops.PrefillPlanner(
        max_batch=len(batch.kv_lens) + d.pick(0, 2),
        max_tokens=max(1, batch.rows),
        max_pages=max(1, sum(map(len, batch.pages)) + 2),
        page_size=shape.page_size,
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim=width,
        head_dim_vo=ckv,
        causal=o.causal and d.chance(0.5),
        tile_rows=d.pick(None, None, 1, 4),
        num_ctas=d.pick(None, 1, 33),
        device=d.device,
    )
    poison_plan(planner)
    plan = planner.plan(batch.qo_indptr(), *batch.page_table(wide=False))
    cache = batch.both[0][:, :, 0].float()
    parts = cache[..., :ckv].to(shape.kv_dtype), cache[..., ckv:].to(shape.kv_dtype)
    if d.chance(0.5):
        whole = d.place(batch.both[0][:, :, 0])
        ckv_cache, kpe_cache = whole[..., :ckv], whole[..., ckv:]
    else:
        ckv_cache, kpe_cache = map(d.place, parts)
    q = torch.cat(batch.q_rows)
    if d.chance(0.5):
        whole_q = d.place(q)
        q_nope, q_pe = whole_q[..., :ckv], whole_q[..., ckv:]
    else:
        q_nope, q_pe = d.place(q[..., :ckv]), d.place(q[..., ckv:])
    arguments = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "ckv_cache": ckv_cache,
        "kpe_cache": kpe_cache,
        "plan": plan,
        "workspace": planner.workspace,
        **op_options("batch_mla", o, shape, d),
    }
    return attention_call(d, "batch_mla", arguments, batch.expected(exact), shape, o, f"{batch}, {o}")


def latent_values(batch: Batch) -> None:
    """The values of MLA are the first columns of the keys."""
    batch.values = [k[..., : batch.shape.dims[1]] for k in batch.keys]


def append_kv(d: Draw) -> Call:
    return append_call(d, "append_kv")


def append_mla_kv(d: Draw) -> Call:
    return append_call(d, "append_mla_kv")


def append_call(d: Draw, op: str, call: Callable[..., Any] | None = None) -> Call:
    """An append of tokens at random places, some of which are skipped. The caches must hold these tokens after it."""
    mla = op == "append_mla_kv"
    shape = Shape.draw(d, mla=mla)
    batch = Batch(d, shape, longest=d.by_size(20, 100, 500))
    names = ("ckv", "kpe", "ckv_cache", "kpe_cache") if mla else ("k", "v", "k_cache", "v_cache")
    indptr, indices, last = batch.page_table(wide=False)
    capacity = [len(mine) * shape.page_size for mine in batch.pages]
    taken: set[int] = set()
    places: list[tuple[int, int]] = []
    for _ in range(d.integer(0, 12)):
        b = d.integer(-1, len(capacity) - 1)
        position = d.integer(0, capacity[b] + (3 if call is None else -1)) if b >= 0 and capacity[b] else 0
        skipped = b < 0 or position >= capacity[b]
        if skipped and b >= 0 and call is not None:
            b = -1  # public functions are given tokens that have a page
        at = (
            -1
            if skipped
            else batch.pages[b][position // shape.page_size] * shape.page_size + (position % shape.page_size)
        )
        if at < 0 or at not in taken:  # two tokens at one place would race
            taken.add(at)
            places.append((b, position))
    heads, (dim, dim_vo) = shape.heads[1], shape.dims
    if mla:
        tokens = [d.normal(len(places), n).to(shape.kv_dtype) for n in (dim_vo, dim - dim_vo)]
        whole = batch.both[0][:, :, 0].float()
        caches = [d.place(part.to(shape.kv_dtype)) for part in (whole[..., :dim_vo], whole[..., dim_vo:])]
    else:
        tokens = [d.normal(len(places), heads, n).to(shape.kv_dtype) for n in (dim, dim_vo)]
        caches = list(batch.caches())
    given = [d.place(t) for t in tokens]
    before = [cache.clone() for cache in caches]

    def fill(cache: Tensor, new: Tensor) -> Tensor:
        expected = cache.clone()
        nhd = expected.transpose(1, 2) if shape.kv_layout == "HND" and not mla else expected
        for (b, position), token in zip(places, new, strict=True):
            if b >= 0 and position < capacity[b]:
                nhd[batch.pages[b][position // shape.page_size], position % shape.page_size] = token.to(d.device)
        return expected

    after = [fill(cache, new) for cache, new in zip(caches, tokens, strict=True)]
    columns = [torch.tensor([p[i] for p in places], dtype=torch.int32, device=d.device) for i in (0, 1)]
    arguments: dict[str, Any] = {
        **dict(zip(names, (*given, *caches), strict=True)),
        "batch_indices": columns[0],
        "positions": columns[1],
        "kv_indices": indices,
        "kv_indptr": indptr,
    }
    if not mla:
        arguments["kv_layout"] = shape.kv_layout

    def run() -> Any:
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        if call is not None:
            return call(arguments, last)
        return getattr(ops, op)(**arguments, backend=d.backend)

    def check(_: Any) -> None:
        for cache, expected in zip(caches, after, strict=True):
            assert torch.equal(cache.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))

    reads = [*tensors_of(arguments), last]
    return Call(op, f"{batch}, {places}", run, check, reads, caches, traceable=call is None)


# Merging


def states(d: Draw, *leading: int) -> tuple[Tensor, Tensor]:
    """``v [*leading, H, D]`` and ``s [*leading, H]``; states without keys have any value in ``v``."""
    shape = (*leading, d.integer(1, 5), d.pick(8, 16, 64, 72, 128))
    return d.normal(*shape).to(d.pick(torch.float16, torch.bfloat16, torch.float32)), d.normal(*shape[:-1]) * d.pick(
        1, 5, 100
    )


def _some_empty(d: Draw, v: Tensor, s: Tensor) -> Tensor:
    if d.chance(0.5):
        s[torch.rand(s.shape, generator=d.generator) < 0.3] = -math.inf
    return s


def close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Merged values are convex combinations: the error is a few eps of the largest."""
    v, s = got
    eps = torch.finfo(v.dtype).eps
    torch.testing.assert_close(v.double().cpu(), expected[0], rtol=4 * eps, atol=16 * eps)
    torch.testing.assert_close(s.double().cpu(), expected[1], rtol=1e-6, atol=1e-5)


def merge_call(d: Draw, op: str, call: Callable[..., Any]) -> Call:
    """``call`` takes the tensors of ``op`` by position."""
    rows = d.pick(0, 1, 2, 5, 40)
    if op in ("merge_state", "merge_state_in_place"):
        v, s = states(d, rows, 2)
    elif op == "merge_states":
        v, s = states(d, rows, d.pick(0, 1, 2, 5, 33))
    else:
        v, s = states(d, rows)
    s = _some_empty(d, v, s)
    mask, written = None, list[Tensor]()
    if op == "merge_states_varlen":
        cuts = sorted(d.integer(0, rows) for _ in range(d.pick(0, 1, 4)))
        indptr = torch.tensor([0, *cuts, rows])
        parts = [
            merge(v[None, a:b], s[None, a:b]) for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)
        ]
        expected = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        tensors = [d.place(v, 1), d.place(s, 0), indptr.to(d.device, torch.int32)]
    elif op == "merge_states":
        expected = merge(v, s)
        tensors = [d.place(v, 1), d.place(s, 0)]
    else:
        expected = merge(v, s)
        tensors = [d.place(t, 1) for t in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
        if op == "merge_state_in_place":
            written = tensors[:2]
            if d.chance(0.5):
                mask = torch.rand(rows, generator=d.generator) < 0.5
                expected = v[:, 0].double().clone(), s[:, 0].double().clone()
                for old, new in zip(expected, merge(v[mask], s[mask]), strict=True):
                    old[mask] = new
                mask = mask.to(d.device)
    before = [t.clone() for t in written]

    def run() -> Any:
        for t, old in zip(written, before, strict=True):
            t.copy_(old)
        result = call(*tensors, *([] if mask is None else [mask]))
        return tuple(t.clone() for t in written) if written else result

    reads = [*tensors, *([] if mask is None else [mask])]
    text = f"rows={rows}, v={list(v.shape)} {v.dtype}, masked={mask is not None}"
    return Call(op, text, run, lambda got: close(got, expected), reads, written)


def _merge(op: str) -> Callable[[Draw], Call]:
    def draw(d: Draw) -> Call:
        return merge_call(d, op, lambda *tensors: getattr(ops, op)(*tensors, backend=d.backend))

    return draw


# Helpers: page tables and bits


def _int32(values: Any, d: Draw) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=d.device)


def _equal(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.tolist() == b, f"{a.tolist()}, expected {b}"


def batch_indices_positions(d: Draw) -> Call:
    counts = [d.pick(0, 1, 2, d.integer(0, 20)) for _ in range(d.integer(1, 8))]
    lens = [n + d.pick(0, 3, 50) for n in counts]
    spare = d.pick(0, 0, 3)
    indptr, seq_lens = _int32([sum(counts[:i]) for i in range(len(counts) + 1)], d), _int32(lens, d)
    batch = [b for b, n in enumerate(counts) for _ in range(n)] + [-1] * spare
    positions = [m - n + i for n, m in zip(counts, lens, strict=True) for i in range(n)]
    return Call(
        "batch_indices_positions",
        f"{counts}, {lens}, spare={spare}",
        lambda: ops.batch_indices_positions(indptr, seq_lens, sum(counts) + spare, backend=d.backend),
        lambda got: _equal((got[0], got[1][: len(positions)]), (batch, positions)),
        [indptr, seq_lens],
    )


def seq_lens(d: Draw) -> Call:
    shape = Shape.draw(d)
    batch = Batch(d, shape)
    indptr, _, last = batch.page_table(wide=False)
    return Call(
        "seq_lens",
        str(batch),
        lambda: ops.seq_lens(indptr, last, shape.page_size, backend=d.backend),
        lambda got: _equal([got], [batch.kv_lens]),
        [indptr, last],
    )


def page_table(d: Draw) -> Call:
    shape = Shape.draw(d)
    batch = Batch(d, shape)
    tables, lens = batch.block_tables(), batch.seq_lens
    flat = [page for mine in batch.pages for page in mine]
    indptr = [sum(map(len, batch.pages[:b])) for b in range(len(batch.pages) + 1)]
    last = [(n - 1) % shape.page_size + 1 for n in batch.kv_lens]

    def check(got: tuple[Tensor, Tensor, Tensor]) -> None:
        _equal((got[0], got[1][: len(flat)]), (indptr, flat))
        assert all(a == b for a, b, n in zip(got[2].tolist(), last, batch.kv_lens, strict=True) if n)

    return Call(
        "page_table",
        str(batch),
        lambda: ops.page_table(tables, lens, shape.page_size, backend=d.backend),
        check,
        [tables, lens],
    )


def shard_page_table(d: Draw) -> Call:
    shape = Shape.draw(d)
    batch = Batch(d, shape)
    world = d.integer(1, 4)
    rank, size = d.integer(0, world - 1), shape.page_size
    interleave = size * d.pick(1, 1, 2, 5)
    table = batch.page_table(wide=False)
    indptr, flat, last = [0], [], []
    for pages, n in zip(batch.pages, batch.kv_lens, strict=True):
        owned = [p for p in range(-(-n // size)) if p * size // interleave % world == rank]
        flat += [pages[p] for p in owned]
        indptr.append(len(flat))
        last.append(min(size, n - owned[-1] * size) if owned else 0)

    def check(got: tuple[Tensor, Tensor, Tensor]) -> None:
        _equal((got[0], got[1][: len(flat)], got[2]), (indptr, flat, last))
        assert not got[1][len(flat) :].any()

    return Call(
        "shard_page_table",
        f"{batch}, rank={rank}, world={world}, interleave={interleave}",
        lambda: ops.shard_page_table(*table, size, rank, world, interleave, backend=d.backend),
        check,
        list(table),
    )


def _pack(bits: list[bool], bitorder: str) -> list[int]:
    padded = bits + [False] * (-len(bits) % 8)
    weights = [128 >> i for i in range(8)] if bitorder == "big" else [1 << i for i in range(8)]
    return [sum(w for w, bit in zip(weights, padded[i : i + 8], strict=True) if bit) for i in range(0, len(padded), 8)]


def packbits(d: Draw) -> Call:
    n, bitorder = d.pick(0, 1, 7, 8, 9, d.integer(0, 3000)), d.pick("big", "little")
    bits = torch.rand(n, generator=d.generator) < 0.5
    x = d.place(bits)
    return Call(
        "packbits",
        f"{n}, {bitorder}",
        lambda: ops.packbits(x, bitorder=bitorder, backend=d.backend),
        lambda got: _equal([got], [_pack(bits.tolist(), bitorder)]),
        [x],
    )


def segment_packbits(d: Draw) -> Call:
    lens, bitorder = [d.pick(0, 1, 8, d.integer(0, 100)) for _ in range(d.integer(1, 6))], d.pick("big", "little")
    bits = torch.rand(sum(lens), generator=d.generator) < 0.5
    expected, ends = list[int](), [0]
    for part in bits.split(lens):
        expected += _pack(part.tolist(), bitorder)
        ends.append(len(expected))
    x, indptr = d.place(bits), _int32([sum(lens[:i]) for i in range(len(lens) + 1)], d)
    return Call(
        "segment_packbits",
        f"{lens}, {bitorder}",
        lambda: ops.segment_packbits(x, indptr, len(expected), bitorder=bitorder, backend=d.backend),
        lambda got: _equal(got, (expected, ends)),
        [x, indptr],
    )


ATTENTION: dict[str, Callable[[Draw], Call]] = {
    "batch_decode": batch_decode,
    "batch_prefill": batch_prefill,
    "ragged_prefill": ragged_prefill,
    "single_prefill": single_prefill,
    "batch_mla": batch_mla,
    "block_sparse_prefill": SPARSE_OPS["block_sparse_prefill"],
}
OTHERS: dict[str, Callable[[Draw], Call]] = {
    "append_kv": append_kv,
    "append_mla_kv": append_mla_kv,
    "batch_indices_positions": batch_indices_positions,
    "seq_lens": seq_lens,
    "page_table": page_table,
    "shard_page_table": shard_page_table,
    "block_sparse_table": SPARSE_OPS["block_sparse_table"],
    **{op: _merge(op) for op in ("merge_state", "merge_states", "merge_state_in_place", "merge_states_varlen")},
    "packbits": packbits,
    "segment_packbits": segment_packbits,
}
OPS = ATTENTION | OTHERS
"""How a call of each op is drawn. ``plan_decode`` and ``plan_prefill`` are called by the planners of the others."""

__all__ = ["ATTENTION", "FP8", "OPS", "OTHERS", "Request"]
