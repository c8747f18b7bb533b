"""Decode tiles and shares per multiprocessor against each other: where the table of tiles comes from."""

from __future__ import annotations

import argparse
import importlib
import itertools
from unittest import mock

import torch

from .decode_problem import DecodeProblem
from .decode_rows import ROWS
from .report import READ_RATE
from .timing import Call, device_microseconds

BACKEND = "attn_ops.kernels.triton"


def parse(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=parse, default=[0, 4, 6, 9, 12], help="numbers of the decode table's rows")
    parser.add_argument("--tiles", type=lambda t: [parse(x) for x in t.split(":")], default=[[64, 4, 3]])
    parser.add_argument("--shares", type=parse, default=[2], help="CTAs per multiprocessor, or above 8 per KV head")
    parser.add_argument("--slack", type=int, help="the planner's SLACK")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--shard", type=lambda t: tuple(map(int, t.split("/"))), default=(0, 1))


def _call(problem: DecodeProblem, share: int) -> Call:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    ctas = share if share > 8 else max(1, multiprocessors * share // problem.row.num_kv_heads)
    planner = problem.planner(num_ctas=ctas)
    plan = planner.plan(*problem.page_table)

    def call(copy: int) -> torch.Tensor:
        k_cache, v_cache = problem.k_caches[copy], problem.v_caches[copy]
        return torch.ops.attn.batch_decode(problem.q, k_cache, v_cache, plan, planner.workspace, backend="triton")[0]

    return call


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """``--tiles`` is ``tokens,warps,stages:...``."""
    decode, tiles, plans = (importlib.import_module(f"{BACKEND}.{m}") for m in ("decode", "tiles", "plan_decode"))
    if args.slack:
        plans.SLACK = args.slack
    for index in args.rows:
        row = ROWS[index]
        problem = DecodeProblem(row)
        chosen = tiles.decode_tile(
            problem.q.device, problem.dtype, row.head_dim, row.head_dim, row.num_qo_heads // row.num_kv_heads
        )
        print(f"{row.name}: goal {row.goal}, {row.bytes() / READ_RATE:.1f} at 4.45 TB/s", flush=True)
        for number, (tile, share) in enumerate(itertools.product(args.tiles, args.shares)):
            if number % args.shard[1] != args.shard[0]:
                continue
            tokens, warps, stages = tile
            options = chosen.options._replace(num_warps=warps, num_stages=stages)
            swept = chosen._replace(kv=tokens, options=options)
            with mock.patch.object(decode, "decode_tile", lambda *_, swept=swept: swept):
                call = _call(problem, share)
                error = problem.error(call(0))
                times = {} if args.compile_only else device_microseconds({"": call}, problem.copies, row.goal, rounds=5)
            print(f"  {tile} share {share}: {times.get('', 0):7.1f}  error {error:.1e}", flush=True)
