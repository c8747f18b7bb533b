"""Build the peers' kernels before anything is measured: FlashInfer's variants, several at once."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from .contest import NotMeasuredError
from .decode_rows import ROWS
from .peers import flashinfer
from .prefill_rows import PREFILL_ROWS

NO_POSITIONS, NO_WINDOW, NO_CAP, NO_PROFILER, WIDE_PRODUCT = 0, False, False, False, False
XQA_PAGES = (16, 64)

CORES_PER_FAMILY = 4
"""A family is about ten files, compiled at once, of 2 GB of memory each."""

KINDS = ("main", "heads", "fp8", "mla")
"""Heads of 128 in bf16; the other head sizes of prefill; decode with an FP8 cache; MLA."""

Family = tuple[str, tuple[Any, ...]]
"""A generator of ``flashinfer.jit`` and its arguments."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="default: all, in this order")


def _prefill(backend: str, kv: torch.dtype, qk: int, vo: int) -> Family:
    dtype = torch.bfloat16
    options = (NO_POSITIONS, NO_WINDOW, NO_CAP, WIDE_PRODUCT)
    return "gen_batch_prefill_module", (backend, dtype, kv, dtype, torch.int32, qk, vo, *options)


def families() -> Iterator[Family]:
    """What the rows of this driver need, the slowest to build first; repetitions included."""
    dtype, index = torch.bfloat16, torch.int32
    for backend in ("fa3", "fa2"):
        for row in PREFILL_ROWS:
            yield _prefill(backend, dtype, row.head_dim, row.head_dim_vo)
    mla = (dtype, dtype, dtype, index, 512, 64, NO_PROFILER)
    yield from (("gen_batch_mla_module", (backend, *mla)) for backend in ("fa3", "fa2"))
    for decode in ROWS:
        kv, dim = torch.float8_e4m3fn if decode.fp8 else dtype, decode.head_dim
        yield _prefill("fa2", kv, dim, dim)  # decode with tensor cores
        types = (dtype, kv, dtype, index, dim, dim, NO_POSITIONS)
        yield "gen_batch_attention_module", (*types, NO_CAP, NO_PROFILER)
        yield "gen_batch_decode_module", (*types, NO_WINDOW, NO_CAP)
        if decode.page_size in XQA_PAGES:
            group = decode.num_qo_heads // decode.num_kv_heads
            yield "gen_xqa_module", (dtype, kv, decode.page_size, dim, group, NO_WINDOW, dtype, 1)


def kind(family: Family) -> str:
    """What of the driver waits for it."""
    name, options = family
    if "mla" in name:
        return "mla"
    if torch.float8_e4m3fn in options:
        return "fp8"
    dims = {64, 192, 256}.intersection(option for option in options if isinstance(option, int))
    return "heads" if dims and "prefill" in name else "main"


def _build(family: Family) -> str:
    """What became of it, in words."""
    name, options = family
    began = time.perf_counter()
    try:
        flashinfer()
        import flashinfer.jit.xqa as jit_xqa
        from flashinfer import jit

        spec = getattr(jit_xqa if "xqa" in name else jit, name)(*options)
        spec.build(False)
    except Exception as error:  # whatever another library raises
        return f"{name}{options} does not build: {str(error)[-300:]}"
    return f"{spec.name}: {time.perf_counter() - began:.0f} s"


def run(args: argparse.Namespace) -> None:
    """A family that does not build is named, and the others are built."""
    try:
        flashinfer()
    except NotMeasuredError as error:
        print(error)
        return
    found = tuple(dict.fromkeys(families()))
    wanted = [family for only in args.only for family in found if kind(family) == only]
    workers = max(1, (os.cpu_count() or 1) // CORES_PER_FAMILY)
    with ThreadPoolExecutor(workers) as pool:
        for outcome in as_completed([pool.submit(_build, family) for family in wanted]):
            print(outcome.result(), flush=True)
