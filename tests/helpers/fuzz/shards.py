"""Random valid calls on the ranks of a mesh, heads by context, one after the other in this process, and their merge.

Each rank has a share of the heads and a part of every request's keys, in a cache of its own that is NaN elsewhere. The
oracle attends to all keys with all heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import attn_ops
from attn_ops.distributed import ContextShard
from attn_ops.distributed.merge import _add_sinks, _packed, _unpacked
from attn_ops.distributed.sharding_plan import local_plan
from helpers.fuzz.attention import COUNTERS, latent_values, op_options, poison_plan
from helpers.fuzz.batch import Batch, Shape, draw_options, draw_prefill_options, tolerance
from helpers.fuzz.draw import Call, Draw, tensors_of
from helpers.fuzz.oracle import Options, attend_all

ops = torch.ops.attn


class Mesh:
    """``heads`` ranks that share the heads by ``context`` ranks that share the keys."""

    def __init__(self, d: Draw, shape: Shape) -> None:
        kv_heads = shape.heads[1]
        shares = [n for n in (2, 3, 4) if shape.heads[0] % n == 0 and (kv_heads == 1 or kv_heads % n == 0)]
        self.heads = d.pick(1, *shares)
        self.context = d.pick(2, *d.by_size((3,), (2, 3, 5, 8), ())) if self.heads == 1 or d.chance(0.6) else 1
        self.interleave = shape.page_size * d.pick(1, 1, 2, 5)

    def owner(self, position: int) -> int:
        """The rank that holds the token at ``position``."""
        return position // self.interleave % self.context

    def share(self, t: Tensor, dim: int, rank: int) -> Tensor:
        """The heads of ``rank``; all of a single KV head."""
        return t if t.shape[dim] == 1 else t.chunk(self.heads, dim)[rank]

    def __str__(self) -> str:
        return f"{self.heads} x {self.context} ranks, interleave={self.interleave}"


class Caches:
    """The pages of a batch in the caches of the context ranks, each of which numbers its pages in its own way."""

    def __init__(self, d: Draw, batch: Batch, mesh: Mesh) -> None:
        size = batch.shape.page_size
        numbers = [torch.randperm(batch.num_pages, generator=d.generator).tolist() for _ in range(mesh.context)]
        placed = [(mine, [mesh.owner(i * size) for i in range(len(mine))]) for mine in batch.pages]
        self.ranks = [[torch.full_like(t, math.nan) for t in batch.both] for _ in range(mesh.context)]
        for mine, on in placed:
            for page, rank in zip(mine, on, strict=True):
                for cache, whole in zip(self.ranks[rank], batch.both, strict=True):
                    cache[numbers[rank][page]] = whole[page]
        indptr, indices, last = batch.page_table(host=True)
        flat = [numbers[rank][page] for mine, on in placed for page, rank in zip(mine, on, strict=True)]
        indices = indices.clone()
        indices[: len(flat)] = indices.new_tensor(flat)
        self.table = indptr, indices, last


def _planner(d: Draw, batch: Batch, mesh: Mesh, rank: int, decode: bool, **options: Any) -> Any:
    shape = batch.shape
    sizes: dict[str, Any] = {
        "max_pages": max(1, sum(map(len, batch.pages)) + 2),
        "page_size": shape.page_size,
        "num_qo_heads": shape.heads[0],
        "num_kv_heads": shape.heads[1],
        "head_dim": shape.dims[0],
        "head_dim_vo": shape.dims[1],
        "head_shards": mesh.heads,
        "context": ContextShard(rank, mesh.context, mesh.interleave),
        "device": d.device,
        **options,
    }
    if decode:
        return attn_ops.DecodePlanner(max_batch=len(batch.kv_lens) + 2, **sizes)
    return attn_ops.PrefillPlanner(max_batch=len(batch.kv_lens) + 2, max_tokens=max(1, batch.rows), **sizes)


def _merged(d: Draw, states: Sequence[tuple[Tensor, Tensor]], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The merged state of the context ranks, through the message of each, as ``merge_context`` does without a group."""
    out, lse = states[0]
    if len(states) > 1:
        messages = torch.stack([_packed(*state) for state in states])
        gathered = _unpacked(messages, out.shape[1], out.shape[2], out.dtype)
        out, lse = ops.merge_states(*gathered, backend=d.backend)
    return (out, lse) if sinks is None else _add_sinks(out, lse, sinks)


def _sharded(d: Draw, op: str) -> Call:
    decode, mla = op == "batch_decode", op == "batch_mla"
    shape = Shape.draw(d, mla=mla)
    mesh = Mesh(d, shape)
    without = ["pos_encoding"] if mla or mesh.heads > 1 else []  # slopes of ALiBi depend on a head's number
    if decode:
        o = draw_options(d, shape, "causal", *without)
    elif mla:
        o = draw_options(d, shape, *without)
    else:
        o = draw_prefill_options(d, shape, *without)
    batch = Batch(d, shape, decode=decode, max_rows=d.by_size(4, 20, 100), longest=d.by_size(70, 300, 1500))
    assert batch.pages is not None
    if mla:
        latent_values(batch)
        o = Options(**{**vars(o), "sm_scale": 0.2})
    caches, q = Caches(d, batch, mesh), torch.cat(batch.q_rows)
    bounds: dict[str, Any] = {"window_left": o.window_left} if not mla and d.chance(0.5) else {}
    if not decode and d.chance(0.5):
        bounds |= {"causal": o.causal}
    if d.chance(0.2):
        bounds |= {"fixed_split_size": d.pick(1, 4, 64)}
    options = op_options(op, o, shape, d) | {"sinks": None, "backend": d.backend, "return_lse": True}
    calls: list[list[dict[str, Any]]] = []
    for rank in range(mesh.context):
        planner = _planner(d, batch, mesh, rank, decode, **bounds)
        poison_plan(planner)
        planner.plan(*(() if decode else (batch.qo_indptr(),)), *caches.table)
        plan = local_plan(planner.state, mesh.heads) if mesh.heads > 1 else planner.state
        common = {"plan": plan, "workspace": planner.workspace, **options}
        local = [_tensors(d, op, batch, mesh, share, q, caches.ranks[rank]) for share in range(mesh.heads)]
        calls.append([{**own, **common} for own in local])

    def run() -> tuple[Tensor, Tensor]:
        merged = []
        for share in range(mesh.heads):
            sinks = None if o.sinks is None else mesh.share(o.sinks, 0, share)
            merged.append(_merged(d, [getattr(ops, op)(**parts[share]) for parts in calls], sinks))
        out, lse = (torch.cat(column, 1) for column in zip(*merged, strict=True))
        return out, lse

    def check(got: tuple[Tensor, Tensor]) -> None:
        out, lse = got
        expected.check(out, lse, **tolerance(d, shape, o))

    expected = attend_all(batch.requests(), o)
    writes = [parts[0]["workspace"] for parts in calls]
    counters = [getattr(parts[0]["plan"], name, None) for parts in calls for name in COUNTERS]
    reads = [t for t in tensors_of(calls) if all(t is not other for other in counters)]
    return Call(op, f"{batch}, {o}, {mesh}, {bounds}", run, check, reads, writes)


def _tensors(
    d: Draw, op: str, batch: Batch, mesh: Mesh, share: int, q: Tensor, caches: list[Tensor]
) -> dict[str, Tensor]:
    """The query and the caches of a rank, with its heads."""
    own_q, width = d.place(mesh.share(q, 1, share)), batch.shape.dims[1]
    if op == "batch_mla":
        latent = d.place(caches[0][:, :, 0])
        parts = own_q[..., :width], own_q[..., width:], latent[..., :width], latent[..., width:]
        return dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), parts, strict=True))
    k, v = (mesh.share(t, 2, share) for t in caches)
    if batch.shape.kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return {"q": own_q, "k_cache": d.place(k), "v_cache": d.place(v)}


def _draw(op: str) -> Callable[[Draw], Call]:
    return lambda d: _sharded(d, op)


SHARD_CALLS = {f"{op} on ranks": _draw(op) for op in ("batch_decode", "batch_prefill", "batch_mla")}
