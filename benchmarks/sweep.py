"""Decode tiles and shares per multiprocessor against each other: where the table of tiles comes from."""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Iterator

import torch
from attn_ops.kernels.triton import decode
from attn_ops.kernels.triton.launch import Options
from attn_ops.kernels.triton.tiles import DecodeTile

from .decode_problem import DecodeProblem
from .decode_rows import ROWS, DecodeRow
from .timing import device_microseconds


def parse(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=parse, default=[0, 4, 6, 9, 12], help="indices of the decode table")
    parser.add_argument("--tiles", type=lambda t: [parse(x) for x in t.split(":")], help="kv,warps,stages:...")
    parser.add_argument("--shares", type=parse, default=[2], help="CTAs per multiprocessor, or above 8 per KV head")
    parser.add_argument("--slack", type=int)
    parser.add_argument("--merge", type=parse, default=None, help="few,many,programs")
    parser.add_argument("--hnd", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--shard", type=lambda t: tuple(map(int, t.split("/"))), default=(0, 1))


def tiles(args: argparse.Namespace, row: DecodeRow) -> Iterator[tuple[str, DecodeTile]]:
    for kv, warps, stages, heads in args.tiles:
        yield (
            f"{kv},{warps},{stages},{heads}",
            DecodeTile(kv, heads, row.head_dim, row.head_dim, Options(warps, stages)),
        )


def run(args: argparse.Namespace) -> None:
    if args.merge:
        merge = importlib.import_module("attn_ops.kernels.triton.merge")
        merge.FEW, merge.MANY, merge.MERGE_PROGRAMS = args.merge
    if args.slack:
        importlib.import_module("attn_ops.kernels.triton.plan_decode").SLACK = args.slack
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for index in args.rows:
        row = ROWS[index]
        problem = DecodeProblem(row)
        layout = "HND" if args.hnd else "NHD"
        if args.hnd:
            problem.k_caches, problem.v_caches = (
                [c.transpose(1, 2).contiguous() for c in x] for x in (problem.k_caches, problem.v_caches)
            )
        print(f"\n{row.name}: goal {row.goal}, {row.bytes() / 4.45e6:.1f} at 4.45 TB/s", flush=True)
        configurations = list(itertools.product(tiles(args, row), args.shares))
        for number, ((name, tile), share) in enumerate(configurations):
            if number % args.shard[1] != args.shard[0]:
                continue
            ctas = share if share > 8 else max(1, multiprocessors * share // row.num_kv_heads)
            planner = problem.planner(num_ctas=ctas)
            plan = planner.plan(*problem.page_table)
            decode.decode_tile = lambda *_, tile=tile: tile

            def call(i: int, planner=planner, plan=plan) -> torch.Tensor:
                out, _ = torch.ops.attn.batch_decode(
                    problem.q,
                    problem.k_caches[i],
                    problem.v_caches[i],
                    plan,
                    planner.workspace,
                    backend="triton",
                    kv_layout=layout,
                )
                return out

            try:
                error = 0.0 if args.hnd else problem.error(call(0))
                if not args.compile_only:
                    micros = device_microseconds({"": call}, problem.copies, row.goal, rounds=5)[""]
                    print(f"  {name} share {share}: {micros:7.1f}  error {error:.1e}", flush=True)
            except Exception as e:
                print(f"  {name} share {share}: {type(e).__name__} {str(e)[:100]}", flush=True)
