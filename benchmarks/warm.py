"""Build FlashInfer's kernels for the benchmarks, several in parallel, before anything is measured."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from benchmarks.comparison import NotMeasuredError
from benchmarks.decode_rows import ROWS
from benchmarks.peers import FLASHINFER_HEAD_DIMS, flashinfer
from benchmarks.prefill_peers import MAX_XQA_ROWS
from benchmarks.prefill_rows import PREFILL_FP8_ROWS, PREFILL_ROWS

POS_ENCODINGS = {"NONE": 0, "ROPE_LLAMA": 1, "ALIBI": 2}
SLIDING_WINDOW, SOFT_CAP, PROFILER, FP16_QK_REDUCTION = False, False, False, False
XQA_PAGE_SIZES = (16, 64)

CORES_PER_MODULE = 4
"""A module has about ten files, compiled in parallel with 2 GB of memory each."""

KINDS = ("main", "heads", "fp8", "mla")
"""bf16 with head dim 128; other head dims of prefill; decode with an FP8 KV cache; MLA."""

JitModule = tuple[str, tuple[Any, ...]]
"""The name of a generator in ``flashinfer.jit``, and its arguments."""

LOADED = {
    "gen_batch_prefill_module": "_gen_batch_prefill_primary_module",
    "gen_batch_attention_module": "_gen_batch_attention_primary_module",
}
"""FlashInfer 0.7's wrappers load these variants for keys and values of equal strides. FA3 has none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--only", nargs="*", choices=KINDS, default=KINDS, help="kinds of modules to build; default: all, in this order"
    )


def _prefill(
    backend: str,
    kv: torch.dtype,
    qk: int,
    vo: int,
    window: bool = SLIDING_WINDOW,
    soft_cap: bool = SOFT_CAP,
    query: torch.dtype = torch.bfloat16,
    pos_encoding: str = "NONE",
) -> JitModule:
    options = (POS_ENCODINGS[pos_encoding], window, soft_cap, FP16_QK_REDUCTION)
    return "gen_batch_prefill_module", (backend, query, kv, torch.bfloat16, torch.int32, qk, vo, *options)


def _xqa(kv: torch.dtype, page_size: int, dim: int, group: int, rows: int = 1) -> JitModule:
    dtype = torch.bfloat16
    return "gen_xqa_module", (dtype, kv, page_size, dim, group, SLIDING_WINDOW, dtype, rows)


def modules() -> Iterator[JitModule]:
    """The modules that the benchmarks need, slowest to build first, with repetitions."""
    dtype, index = torch.bfloat16, torch.int32
    prefill = [row for row in PREFILL_ROWS if (row.head_dim, row.head_dim_vo) in FLASHINFER_HEAD_DIMS]
    prefill_fp8 = [row for row in PREFILL_FP8_ROWS if (row.head_dim, row.head_dim_vo) in FLASHINFER_HEAD_DIMS]
    for backend in ("fa3", "fa2"):
        for row in prefill:
            options = row.window_left >= 0, row.logits_soft_cap > 0
            if row.pos_encoding == "NONE" or backend == "fa2":
                dims = row.head_dim, row.head_dim_vo
                yield _prefill(backend, dtype, *dims, *options, pos_encoding=row.pos_encoding)
    for kv in (dtype, torch.float8_e4m3fn):
        mla = (dtype, kv, dtype, index, 512, 64, PROFILER)
        yield from (("gen_batch_mla_module", (backend, *mla)) for backend in ("fa3", "fa2"))
    for decode in (row for row in ROWS if (row.head_dim, row.head_dim) in FLASHINFER_HEAD_DIMS):
        kv, dim = torch.float8_e4m3fn if decode.fp8 else dtype, decode.head_dim
        pos_encoding = "ROPE_LLAMA" if decode.rope else "NONE"
        yield _prefill("fa2", kv, dim, dim, pos_encoding=pos_encoding)  # decode with tensor cores
        types = (dtype, kv, dtype, index, dim, dim, POS_ENCODINGS[pos_encoding])
        yield "gen_batch_decode_module", (*types, SLIDING_WINDOW, SOFT_CAP)
        if decode.rope:
            continue
        yield "gen_batch_attention_module", (*types, SOFT_CAP, PROFILER)
        if decode.page_size in XQA_PAGE_SIZES:
            yield _xqa(kv, decode.page_size, dim, decode.num_qo_heads // decode.num_kv_heads)
    for row in (*prefill, *prefill_fp8):
        kv, dims, rows = torch.float8_e4m3fn if row.fp8 else dtype, (row.head_dim, row.head_dim_vo), row.qo_lens[0]
        if row.fp8_query:
            yield _prefill("fa3", kv, *dims, query=kv)
        elif row.fp8 and row.pos_encoding != "NONE":
            yield _prefill("fa2", kv, *dims, pos_encoding=row.pos_encoding)
        elif len(set(row.qo_lens)) == 1 and rows <= MAX_XQA_ROWS:
            yield _xqa(kv, row.page_size, row.head_dim, row.num_qo_heads // row.num_kv_heads, rows)


def kind(module: JitModule) -> str:
    """The member of :data:`KINDS` that the module belongs to."""
    name, options = module
    if "mla" in name:
        return "mla"
    if torch.float8_e4m3fn in options:
        return "fp8"
    dims = {64, 192, 256}.intersection(option for option in options if isinstance(option, int))
    return "heads" if dims and "prefill" in name else "main"


def generator(jit: Any, module: JitModule) -> Any:
    """The generator of ``jit``, FlashInfer's generators by name, whose module a wrapper loads."""
    name, options = module
    public = getattr(jit, name)
    return public if options[0] == "fa3" else getattr(jit, LOADED.get(name, name), public)


def _build(module: JitModule) -> str:
    """Build a module. Returns the outcome as text."""
    name, options = module
    start = time.perf_counter()
    try:
        flashinfer()
        import flashinfer.jit.attention.modules as jit
        import flashinfer.jit.xqa as jit_xqa

        spec = generator(jit_xqa if "xqa" in name else jit, module)(*options)
        spec.build(False)
    except Exception as error:  # FlashInfer and its compilers raise several types
        return f"{name}{options} does not build: {str(error)[-300:]}"
    return f"{spec.name}: {time.perf_counter() - start:.0f} s"


def run(args: argparse.Namespace) -> None:
    """Build the modules. One that does not build is reported, and the others are built."""
    try:
        flashinfer()
    except NotMeasuredError as error:
        print(error)
        return
    unique = tuple(dict.fromkeys(modules()))
    selected = [module for only in args.only for module in unique if kind(module) == only]
    workers = max(1, (os.cpu_count() or 1) // CORES_PER_MODULE)
    with ThreadPoolExecutor(workers) as pool:
        for outcome in as_completed([pool.submit(_build, module) for module in selected]):
            print(outcome.result(), flush=True)
