"""Cases of tensor parallelism, run by every rank of a group (see ``rank_processes``).

Every rank makes the same tensors, keeps its part of each as a DTensor, and compares the whole result with the oracle.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree

import attn_ops
from attn_ops import errors
from attn_ops.demo.engine import Engine
from attn_ops.demo.memory import Capacity, Memory
from attn_ops.demo.ranks import shard_model
from attn_ops.demo.steps import DecodeStep, PrefillStep
from attn_ops.distributed import RankAgreement, shard_plan
from attn_ops.distributed.sharding_table import SHARDED_DIMS, Axis
from helpers import calls, demo_tiny, oracle
from helpers.cases import DECODE_BASE, PREFILL_BASE, Case
from helpers.harness import OPS, Setup
from helpers.oracle import Expected
from helpers.page_tables import int32

inductor.cpp.simdlen = 1  # compiles in less time, as in conftest.py

DEVICE = os.environ.get("RANKS_ON", "cpu")
Group = dist.ProcessGroup
KINDS = {op: kind for kind, op in OPS.items()}


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tp",))


def axis_of(op: str, name: str) -> Axis:
    return next(axis for axis in SHARDED_DIMS[op] if axis.name == name)


def part(t: Tensor, dim: int | None) -> DTensor:
    """This rank's view of ``t`` as a DTensor, ``t`` itself if ``dim`` is None."""
    local = t if dim is None else t.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(local, mesh(), [placement], run_check=False, shape=t.shape, stride=t.stride())


def sharded(op: str, arguments: dict[str, Any], axis: Axis | None, plain: bool = True) -> dict[str, Any]:
    """The arguments of a call on DTensors. Tensors that are never sharded stay ``plain``, or are replicated."""
    layout = arguments.get("kv_layout", "NHD")
    names = {name for a in SHARDED_DIMS[op] for name in a.dims}

    def convert(name: str, t: Any) -> Any:
        dim = axis.of_layout(layout).get(name) if axis else None
        if not isinstance(t, Tensor) or (plain and name not in names):
            return t
        single = dim is not None and t.shape[dim] == 1 and name not in ("q", "sinks")
        return part(t, None if single else dim)

    return {
        name: type(value)(*(convert(name, t) for t in value)) if name == "plan" else convert(name, value)
        for name, value in arguments.items()
    }


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Call the op, which must not communicate."""
    with CommDebugMode() as communication, torch.no_grad():
        result = getattr(torch.ops.attn, op)(**arguments)
    assert not communication.get_total_counts(), communication.get_comm_counts()
    return result


def whole(t: Any, axis: Axis | None) -> Tensor:
    """An output, which must be a DTensor that is sharded along ``axis``."""
    assert isinstance(t, DTensor)
    expected = Shard(axis.output) if axis and t.dim() > axis.output else Replicate()
    assert t.placements == (expected,), t.placements
    if t.dtype.itemsize > 1 or not t.is_floating_point():
        return t.full_tensor()
    bits = DTensor.from_local(t.to_local().view(torch.uint8), mesh(), t.placements)  # gloo has no FP8
    return bits.full_tensor().view(t.dtype)


def to_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return pytree.tree_map_only(Tensor, lambda t: t.to(DEVICE), arguments)


HEADS = {2: ((4, 2), (8, 2), (4, 4), (4, 1)), 4: ((4, 4), (16, 4), (8, 8), (8, 1))}
"""Query and KV heads, by the number of ranks: groups of one, of several, and multi-query."""

OPTIONS: tuple[dict[str, Any], ...] = (
    {"kv_layout": "HND"},
    {"kv_layout": "HND", "storage": "fused"},
    {"storage": "fused", "sinks": 1.0},
    {"window_left": 33, "logits_soft_cap": 5.0},
    {"pos_encoding": "ROPE_LLAMA", "head_dims": (64, 32)},
    {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 3.0)},
    {"dtype": torch.bfloat16, "out_dtype": torch.float8_e5m2},
    {"padding": 3, "spare_batch": 5},
)
PREFILL_OPTIONS: tuple[dict[str, Any], ...] = ({"causal": True}, {"masked": 0.5}, {"window_right": 7, "causal": False})
GPU_OPTIONS: tuple[dict[str, Any], ...] = (
    {"kv_layout": "HND", "storage": "fused", "sinks": 1.0, "window_left": 33, "logits_soft_cap": 5.0},
    {"pos_encoding": "ROPE_LLAMA", "head_dims": (64, 32)},
    {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 3.0), "padding": 3, "spare_batch": 5},
)
"""On GPUs, where kernels are compiled for each case. Options by themselves are compiled by the tests on one GPU."""


def attention_cases(kind: str) -> Iterator[Case]:
    base = DECODE_BASE if kind == "decode" else PREFILL_BASE
    heads = HEADS[dist.get_world_size()]
    for pair in heads if DEVICE == "cpu" else (heads[1], heads[3]):
        yield replace(base, heads=pair)
    every = OPTIONS + (() if kind == "decode" else PREFILL_OPTIONS)
    for options in every if DEVICE == "cpu" else GPU_OPTIONS:
        if kind == "ragged" and options.get("storage") == "fused":
            options = options | {"storage": "padded"}
        yield replace(base, heads=heads[1], **options)


def compile_kernels(op: str, setups: list[Setup], axis: Axis) -> None:
    """Each rank compiles another part of the kernels, into the cache on disk that all of them read."""
    for setup in setups[dist.get_rank() :: dist.get_world_size()]:
        call(op, sharded(op, setup.arguments, axis))
    dist.barrier()


def attention(group: Group, op: str) -> None:
    """Sharded by heads: group sizes, layouts and options, with LSE, and without it the first."""
    kind, axis = KINDS[op], axis_of(op, "heads")
    setups = [Setup(kind, case, DEVICE) for case in attention_cases(kind)]
    if DEVICE != "cpu":
        compile_kernels(op, setups, axis)
    for i, setup in enumerate(setups):
        out, lse = call(op, sharded(op, setup.arguments, axis))
        tolerance = setup.tolerance("auto" if DEVICE == "cpu" else "triton")
        setup.check(whole(out, axis), whole(lse, axis), **tolerance)
        if DEVICE == "cpu" or i == 0:
            out, lse = call(op, sharded(op, setup.arguments | {"return_lse": False}, axis))
            assert whole(lse, axis).shape == (0,)
            setup.check(whole(out, axis), None, **tolerance)


def replicated_attention(group: Group) -> None:
    """The whole call on every rank, with ALiBi, whose slopes depend on the number of heads."""
    for op, kind in KINDS.items():
        setup = Setup(kind, replace(DECODE_BASE if kind == "decode" else PREFILL_BASE, pos_encoding="ALIBI"), DEVICE)
        for plain in (True, False):
            out, lse = call(op, sharded(op, setup.arguments, None, plain))
            setup.check(whole(out, None), whole(lse, None))


def single_prefill(group: Group) -> None:
    axis = axis_of("single_prefill", "heads")
    for heads in HEADS[dist.get_world_size()] if DEVICE == "cpu" else HEADS[dist.get_world_size()][1:2]:
        for layout in ("NHD", "HND"):
            case = replace(calls.SINGLE_BASE, heads=heads, kv_layout=layout, causal=True, sinks=1.0)
            setup = Setup("ragged", case, DEVICE)
            options: dict[str, Any] = {"heads": heads, "kv_layout": layout, "causal": True, "sinks": 1.0}
            arguments = to_device(calls.arguments("single_prefill", **options))
            out, lse = call("single_prefill", sharded("single_prefill", arguments, axis))
            setup.expected.check(whole(out, axis), whole(lse, axis))


def block_sparse_prefill(group: Group) -> None:
    """One block map for all heads. Keys that no block selects are NaN."""
    op, heads, rows = "block_sparse_prefill", HEADS[dist.get_world_size()][1], 41
    for layout in ("NHD", "HND"):
        case = replace(PREFILL_BASE, heads=heads, kv_layout=layout, sinks=1.0)
        torch.manual_seed(0)
        arguments = calls.arguments(op, heads=heads, kv_layout=layout, sinks=1.0)
        selected = calls.block_map(case, 6, 6)
        selected[:, 1] = False
        mask = selected.repeat_interleave(8, 0)[:rows].repeat_interleave(case.page_size, 1)
        k, v = (arguments[n].nan_to_num() for n in ("k", "v"))
        k, v = (t.transpose(0, 1) if layout == "HND" else t for t in (k, v))
        expected = Expected.of([(arguments["q"], k, v, mask)], sinks=arguments["sinks"])
        axis = axis_of(op, "heads")
        out, lse = call(op, sharded(op, to_device(arguments), axis))
        expected.check(whole(out, axis), whole(lse, axis))


def mla(group: Group) -> None:
    """Heads of the query are sharded, latents are on every rank."""
    case = replace(calls.MLA_BASE, heads=(2 * dist.get_world_size(), 1), causal=True)
    for axis in (axis_of("batch_mla", "heads"), None):
        torch.manual_seed(0)
        arguments = calls.arguments("batch_mla", heads=case.heads, causal=True)
        cache = torch.cat((arguments["ckv_cache"], arguments["kpe_cache"]), -1)
        q = torch.cat((arguments["q_nope"], arguments["q_pe"]), -1)
        plan = arguments["plan"]
        requests = []
        for b, rows in enumerate(q.split(case.qo_lens)):
            pages = plan.kv_indices[plan.kv_indptr[b] : plan.kv_indptr[b + 1]]
            keys = cache[pages].flatten(0, 1)[: case.kv_lens[b], None]
            requests.append((rows, keys, keys[..., : case.head_dims[1]]))
        expected = Expected.of(requests, causal=True, sm_scale=0.2)
        out, lse = call("batch_mla", sharded("batch_mla", to_device(arguments), axis))
        expected.check(whole(out, axis), whole(lse, axis))


def append(group: Group) -> None:
    """A rank writes its heads of the cache, and nothing beside them."""
    for heads in HEADS[dist.get_world_size()]:
        for layout in ("NHD", "HND"):
            axis = axis_of("append_kv", "heads") if heads[1] > 1 else None
            expected = to_device(calls.arguments("append_kv", heads=heads, kv_layout=layout))
            torch.ops.attn.append_kv(**expected)
            arguments = to_device(calls.arguments("append_kv", heads=heads, kv_layout=layout))
            assert call("append_kv", sharded("append_kv", arguments, axis)) is None
            for name in ("k_cache", "v_cache"):
                want, got = expected[name], arguments[name]
                assert want.count_nonzero()
                if axis is None:
                    assert torch.equal(got, want)
                    continue
                world, dim = dist.get_world_size(), axis.of_layout(layout)[name]
                for rank, (theirs, right) in enumerate(zip(got.chunk(world, dim), want.chunk(world, dim), strict=True)):
                    assert torch.equal(theirs, right) if rank == dist.get_rank() else not theirs.count_nonzero()


def _merged(op: str, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if op == "merge_states":
        return oracle.merge(a["v"], a["s"])
    if op == "merge_states_varlen":
        rows = [slice(i, j) for i, j in zip(a["indptr"].tolist(), a["indptr"].tolist()[1:], strict=False)]
        merged = [oracle.merge(a["v"][None, r], a["s"][None, r]) for r in rows]
        return torch.cat([m[0] for m in merged]), torch.cat([m[1] for m in merged])
    names = ("v", "s", "v_other", "s_other") if op == "merge_state_in_place" else ("v_a", "s_a", "v_b", "s_b")
    v, s, other_v, other_s = (a[name] for name in names)
    out, lse = oracle.merge(torch.stack((v, other_v), 1), torch.stack((s, other_s), 1))
    if a.get("mask") is None:
        return out, lse
    keep = a["mask"].bool()
    return torch.where(keep[:, None, None], out, v.double()), torch.where(keep[:, None], lse, s.double())


def merges(group: Group, op: str) -> None:
    """By heads, by rows that do not divide evenly, and replicated."""
    for axis in (*SHARDED_DIMS[op], None):
        for plain in (True, False):
            arguments = calls.arguments(op)
            if op == "merge_state_in_place":
                arguments["mask"] = torch.tensor([True, False, True, True, False])
            expected = _merged(op, arguments)
            arguments = sharded(op, to_device(arguments), axis, plain)
            result = call(op, arguments)
            if result is None:
                result = arguments["v"], arguments["s"]
                got = [t.full_tensor() for t in result]
            else:
                got = [whole(t, axis) for t in result]
            for actual, want in zip(got, expected, strict=True):
                torch.testing.assert_close(actual.cpu().double(), want, rtol=1e-5, atol=1e-6)


def replicated_ops(group: Group) -> None:
    """Ops without heads take replicated tensors and return them."""
    ops = [op for op, axes in SHARDED_DIMS.items() if not axes]
    assert len(ops) > 5
    for op in ops:
        torch.manual_seed(0)
        expected = to_device(calls.arguments(op))
        arguments = pytree.tree_map_only(Tensor, Tensor.clone, expected)
        want = calls.observed(op, expected, getattr(torch.ops.attn, op)(**expected))
        on_ranks = sharded(op, arguments, None, plain=False)
        result = call(op, on_ranks)
        got = calls.observed(op, arguments, pytree.tree_map(lambda t: None if t is None else whole(t, None), result))
        assert len(got) == len(want)
        for actual, right in zip(got, want, strict=True):
            assert torch.equal(actual, right), op


class Layer(nn.Module):
    """Projections, append and decode. ``local`` attends to plain tensors of one rank's heads."""

    def __init__(self, heads: tuple[int, int], dim: int, local: bool) -> None:
        super().__init__()
        self.dim, self.local, width = dim, local, 32
        self.q, self.k, self.v = (nn.Linear(width, n * dim, bias=False) for n in (heads[0], heads[1], heads[1]))
        self.o = nn.Linear(heads[0] * dim, width, bias=False)

    def forward(self, x: Tensor, cache: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (-1, self.dim)) for proj in (self.q, self.k, self.v))
        rows = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        k_cache, v_cache = cache.unbind(1)
        positions = plan.kv_len[: x.shape[0]] - 1
        torch.ops.attn.append_kv(k, v, k_cache, v_cache, rows, positions, plan.kv_indices, plan.kv_indptr)
        return self.o(torch.ops.attn.batch_decode(q, k_cache, v_cache, plan, workspace)[0].flatten(1))


PAGES, PAGE, BATCH, DIM = 24, 4, 3, 16


def _layers(local: bool) -> tuple[Layer, Layer, tuple[int, int]]:
    """The whole layer, and the same on the ranks."""
    heads = 2 * dist.get_world_size(), dist.get_world_size()
    torch.manual_seed(1)
    plain, parallel = (Layer(heads, DIM, local).requires_grad_(False).to(DEVICE) for _ in range(2))
    parallel.load_state_dict(plain.state_dict())
    columns = {name: ColwiseParallel(use_local_output=local) for name in ("q", "k", "v")}
    parallelize_module(parallel, mesh(), {**columns, "o": RowwiseParallel()})
    return plain, parallel, heads


def _steps() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Page tables of growing requests, of other requests and of an empty one."""
    for lengths in ([5, 1, 9], [6, 2, 10], [30, 17, 40], [1, 1, 0]):
        pages = [-(-n // PAGE) for n in lengths]
        table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(sum(lengths)))[: sum(pages)]
        last = int32([(n - 1) % PAGE + 1 if n else 1 for n in lengths])
        yield int32([0, *torch.tensor(pages).cumsum(0).tolist()]), table.int(), last


def layer(group: Group, local: bool, compiled: bool) -> None:
    """Append and decode in a layer of ``parallelize_module``, over steps of changing lengths."""
    plain, parallel, heads = _layers(local)
    shared: dict[str, Any] = {
        "page_size": PAGE, "num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim": DIM, "max_kv_len": 64,
        "device": DEVICE,
    }  # fmt: skip
    planner = attn_ops.DecodePlanner(BATCH, PAGES, head_shards=dist.get_world_size(), **shared)
    whole_planner = attn_ops.DecodePlanner(BATCH, PAGES, **shared)
    plan = shard_plan(planner.state, mesh()) if local else planner.state
    torch.manual_seed(2)
    cache = torch.randn(PAGES, 2, PAGE, heads[1], DIM).to(DEVICE)
    mine: Any = cache.chunk(dist.get_world_size(), 3)[dist.get_rank()].clone(memory_format=torch.contiguous_format)
    if not local:
        mine = DTensor.from_local(mine, mesh(), [Shard(3)], run_check=False)
    backend = "aot_eager" if local else "inductor"
    step = torch.compile(parallel, fullgraph=True, backend=backend) if compiled else parallel
    for i, table in enumerate(_steps()):
        x = torch.randn(BATCH, 32).to(DEVICE)
        planner.plan(*table)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=i > 0):
            got = step(x, mine, plan, planner.workspace)
            want = plain(x, cache, whole_planner.plan(*table), whole_planner.workspace)
        tolerance = 2e-5 if DEVICE == "cpu" else 2e-2  # TF32 in Linear on a GPU
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    written = mine if local else mine.to_local()
    torch.testing.assert_close(written, cache.chunk(dist.get_world_size(), 3)[dist.get_rank()], rtol=1e-2, atol=1e-2)


def demo_serves_the_same_tokens(group: Group) -> None:
    """The demo's model and engine on the ranks, with continuous batching, and in one process."""
    heads, device = 2 * dist.get_world_size(), torch.empty(0, device=DEVICE).device
    sizes: dict[str, Any] = {
        "num_qo_heads": heads,
        "num_kv_heads": heads // 2,
        "windows": (-1, 6),
        "qkv_bias": True,
        "out_bias": True,
    }
    model = demo_tiny.model(**sizes, intermediate_size=64, qk_norm=True).to(device)
    capacity = Capacity(max_batch=3, page_size=4, num_pages=20, max_tokens=30, prefill_tokens=16)
    outputs = []
    for grid, served in ((mesh(), shard_model(model, mesh())), (None, model)):
        memory = Memory(model.config, capacity, torch.float32, device, grid)
        memory.poison_caches()
        assert memory.caches[0].shape[3] == heads // 2 // (1 if grid is None else grid.size())
        requests = demo_tiny.requests([5, 20, 1, 9, 12], max_new_tokens=6, every=1)
        engine = Engine(memory, PrefillStep(served), DecodeStep(served))
        engine.submit(requests)
        with torch.no_grad():
            engine.run()
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) > 1


def two_mesh_dimensions(group: Group) -> None:
    """Sharded over one dimension of a mesh and replicated over the other, and sharded over both."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for rows, columns in ((1, world), (world, 1), (2, world // 2)):
        grid = init_device_mesh(DEVICE, (rows, columns), mesh_dim_names=("dp", "tp"))
        for over_rows in (False, True):
            shards, index = (world, rank) if over_rows else (columns, rank % columns)
            setup = Setup("decode", replace(DECODE_BASE, heads=HEADS[world][1]), DEVICE)
            arguments = setup.arguments
            for name, dim in (("q", 1), ("k_cache", 2), ("v_cache", 2)):
                t = arguments[name]
                at = [Shard(dim) if over_rows else Replicate(), Shard(dim)]
                local = t.chunk(shards, dim)[index]
                arguments[name] = DTensor.from_local(local, grid, at, run_check=False, shape=t.shape, stride=t.stride())
            out, lse = call("batch_decode", arguments)
            assert list(out.placements) == [Shard(1) if over_rows else Replicate(), Shard(1)]
            setup.check(out.full_tensor(), lse.full_tensor())


def _raises(error: type[Exception], message: str, function: Callable[[], Any]) -> None:
    """``function`` raises the error itself, with this text."""
    with pytest.raises(error, match=re.escape(message)):
        function()


def _refused(error: type[errors.AttnOpsError], message: str, op: str, arguments: dict[str, Any]) -> None:
    """The call raises before it communicates or writes, in an eager call and, in the same words, in a traced one."""
    before = [t.clone() for t in calls.written(op, arguments)]
    _raises(error, message, lambda: call(op, arguments))
    function = torch.compile(lambda: getattr(torch.ops.attn, op)(**arguments), fullgraph=True, backend="eager")
    with torch.no_grad():
        _raises(Exception, message, function)
    torch._dynamo.reset()
    for t, was in zip(calls.written(op, arguments), before, strict=True):
        local, was = (x.to_local() if isinstance(x, DTensor) else x for x in (t, was))
        assert torch.equal(local.nan_to_num(), was.nan_to_num())


def refusals(group: Group) -> None:
    world = dist.get_world_size()
    heads = axis_of("batch_decode", "heads")
    setup = Setup("decode", replace(DECODE_BASE, heads=HEADS[world][1]), DEVICE)
    arguments = setup.arguments | {"return_lse": False}
    valid = sharded("batch_decode", arguments, heads)

    def refused(error: type[errors.AttnOpsError], message: str, **changes: Any) -> None:
        _refused(error, message, "batch_decode", valid | changes)

    refused(errors.PlacementError, "q is S(0) on mesh dimension 'tp'; expected S(1) or R", q=part(setup.q, 0))
    cache = part(setup.k, None)
    refused(errors.PlacementError, "k_cache is R on mesh dimension 'tp'; expected S(2), since q is S(1)", k_cache=cache)
    refused(errors.PlacementError, "k_cache is S(2) on mesh dimension 'tp'; expected S(1)", kv_layout="HND")
    refused(errors.PlacementError, "v_cache is a plain tensor on mesh dimension 'tp'; expected S(2)", v_cache=setup.v)
    refused(errors.PlacementError, "k_cache is S(2) on mesh dimension 'tp'; expected R, since q is a", q=setup.q)
    counters = valid["plan"]._replace(split_counters=part(valid["plan"].split_counters, 1))
    refused(errors.PlacementError, "plan.7 is S(1) on mesh dimension 'tp'; expected R", plan=counters)
    refused(errors.UnsupportedError, "pos_encoding is ALIBI and the heads are sharded", pos_encoding="ALIBI")
    rank_plan = shard_plan(setup.planner.state, mesh())
    local_heads = HEADS[world][1][0] // world
    refused(errors.PlanError, f"the plan was made for num_qo_heads {local_heads}; expected a plan for", plan=rank_plan)
    refused(errors.OptionError, "kv_layout is NDH", kv_layout="NDH")
    odd = Setup("decode", replace(DECODE_BASE, heads=(world + 1, 1)), DEVICE)
    message = f"q has {world + 1} heads for {world} ranks; expected a multiple of {world}"
    _refused(errors.ShapeError, message, "batch_decode", sharded("batch_decode", odd.arguments, heads))
    appended = to_device(calls.arguments("append_kv", heads=HEADS[world][1]))
    some = sharded("append_kv", appended, axis_of("append_kv", "heads"))
    message = "k_cache is R on mesh dimension 'tp'; expected S(2), since k is S(1)"
    _refused(errors.PlacementError, message, "append_kv", some | {"k_cache": part(appended["k_cache"], None)})
    graded = part(setup.q.clone(), 1).requires_grad_()
    _raises(errors.GradientError, "q requires grad", lambda: torch.ops.attn.batch_decode(**(valid | {"q": graded})))
    _raises(
        errors.ShapeError,
        f"num_kv_heads has 3 heads for {world} ranks",
        lambda: attn_ops.DecodePlanner(
            1, 1, page_size=1, num_qo_heads=3 * world, num_kv_heads=3, head_dim=8, head_shards=world
        ),
    )
    uneven = attn_ops.DecodePlanner(1, 1, page_size=1, num_qo_heads=3, num_kv_heads=3, head_dim=8)
    _raises(errors.ShapeError, f"num_qo_heads has 3 heads for {world} ranks", lambda: shard_plan(uneven.state, mesh()))


def shard_plans(group: Group) -> None:
    """The plan of a rank is of views of the planner's tensors, and the same ones in every call."""
    setup = Setup("decode", replace(DECODE_BASE, heads=HEADS[dist.get_world_size()][1]), DEVICE)
    plan = shard_plan(setup.planner.state, mesh())
    again = shard_plan(setup.planner.state, mesh())
    assert all(a is b for a, b in zip(plan, again, strict=True))
    for name, t in plan._asdict().items():
        if name != "problem":
            assert t.data_ptr() == getattr(setup.planner.state, name).data_ptr(), name
    assert attn_ops.planner.PlanProblem.of(plan.problem).num_qo_heads == 8 // 2 or dist.get_world_size() > 2


def agreement(group: Group) -> None:
    """A rank that fails in plan(), or that has another batch, makes all ranks raise."""
    rank, others = dist.get_rank(), RankAgreement(mesh(), timeout=30)
    planner = attn_ops.DecodePlanner(2, 4, page_size=4, num_qo_heads=4, num_kv_heads=4, head_dim=16, device=DEVICE)
    table = int32([0, 1, 3]), int32([0, 1, 2]), int32([4, 2])
    too_long = int32([0, 1, 6]), int32([0, 1, 2, 3, 4, 5]), int32([4, 2])

    def plan(batch: tuple[Tensor, ...]) -> None:
        with others.step(*batch):
            planner.plan(*batch)

    plan(table)
    if rank == 1:
        _raises(errors.CapacityError, "max_pages", lambda: plan(too_long))
    else:
        _raises(errors.RankError, "rank 1 failed with CapacityError: plan", lambda: plan(table))
    plan(table)
    swapped = table[0], table[1].flip(0), table[2]
    _raises(errors.RankError, "rank 1 has other values than rank 0", lambda: plan(swapped if rank == 1 else table))
    plan(swapped)


def agreements_of_threads(group: Group) -> None:
    """A thread that waits for the other ranks keeps no other thread from the store, whose keys do not add up."""
    first, second = (RankAgreement(mesh(), timeout=10) for _ in range(2))
    turns = (first, second) if dist.get_rank() == 0 else (second, first)

    def steps(agreement: RankAgreement) -> None:
        for i in range(3):
            with agreement.step(int32([i])):
                pass

    def keys() -> int:
        dist.barrier(group)  # each rank deletes its own
        number: int = torch.distributed.distributed_c10d._get_default_store().num_keys()
        dist.barrier(group)
        return number

    numbers = []
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(steps, turns[0])
            time.sleep(1)  # by then it waits
            pool.submit(steps, turns[1]).result()
            waiting.result()
        numbers.append(keys())
    assert numbers[0] == numbers[1]


def a_rank_that_does_not_answer(group: Group) -> None:
    """All ranks raise, those too that come late, and the next step is a new one."""
    others, start = RankAgreement(mesh(), timeout=1), time.monotonic()

    def step() -> None:
        with others.step(int32([1, 2])):
            pass

    if dist.get_rank():
        time.sleep(3)
    _raises(errors.RankError, "did not answer", step)
    assert time.monotonic() - start < 20
    dist.barrier(group)
    step()


DEVICE_INDEPENDENT = (
    "refusals",
    "shard_plans",
    "agreement",
    "agreements_of_threads",
    "a_rank_that_does_not_answer",
    "eager layer, local tensors",
)
"""Cases that show nothing on GPUs that they do not show on the CPU, or that another case shows too."""

ALL_CASES: dict[str, Callable[[Group], None]] = {
    **{op: partial(attention, op=op) for op in KINDS},
    **{op: partial(merges, op=op) for op in SHARDED_DIMS if op.startswith("merge")},
    **{
        f"{'compiled' if compiled else 'eager'} layer, {'local tensors' if local else 'DTensors'}": partial(
            layer, local=local, compiled=compiled
        )
        for compiled in (False, True)
        for local in (False, True)
    },
    **{
        case.__name__: case
        for case in (
            demo_serves_the_same_tokens,
            replicated_attention,
            single_prefill,
            block_sparse_prefill,
            mla,
            append,
            replicated_ops,
            two_mesh_dimensions,
            refusals,
            shard_plans,
            agreement,
            agreements_of_threads,
            a_rank_that_does_not_answer,
        )
    },
}
CASES = {name: case for name, case in ALL_CASES.items() if DEVICE == "cpu" or name not in DEVICE_INDEPENDENT}
