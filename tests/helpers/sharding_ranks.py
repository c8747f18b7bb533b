"""Cases of tensor parallelism, run by every rank of a group (see ``rank_processes``).

Every rank makes the same tensors, keeps its part of each as a DTensor, and compares the whole result with the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils import _pytree as pytree

import attn_ops
from attn_ops.demo.engine import Engine
from attn_ops.demo.memory import Capacity, Memory
from attn_ops.demo.ranks import shard_model
from attn_ops.demo.steps import DecodeStep, PrefillStep
from attn_ops.distributed import shard_plan
from attn_ops.distributed.sharding_table import SHARDED_DIMS, Axis
from helpers import calls, demo_tiny, oracle
from helpers.cases import DECODE_BASE, PREFILL_BASE, Case
from helpers.harness import OPS, Setup
from helpers.oracle import Expected
from helpers.page_tables import int32
from helpers.sharded_calls import DEVICE, HEADS, Group, axis_of, call, mesh, sharded, to_device, whole
from helpers.sharding_refusals import (
    a_rank_that_does_not_answer,
    agreement,
    agreements_of_threads,
    refusals,
    shard_plans,
)

KINDS = {op: kind for kind, op in OPS.items()}

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
    """A rank writes its heads of the cache, and nothing else."""
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
    """States divided by heads, divided by rows unevenly, and replicated."""
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
