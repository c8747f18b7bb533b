"""MLA problems, and the check of one of them against the oracle: tensors, plan, call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import attn_ops
from helpers.harness import CPU_BACKENDS
from helpers.oracle import Expected
from helpers.page_tables import indptr, page_table


@dataclass(frozen=True)
class Mla:
    """One batch of ``batch_mla``. ``dims`` are those of ``ckv`` and ``kpe``; ``packed`` caches share memory."""

    name: str
    qo_lens: tuple[int, ...] = (1, 5, 0, 40)
    kv_lens: tuple[int, ...] = (70, 3, 9, 130)
    dims: tuple[int, int] = (32, 8)
    heads: int = 3
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    kv_scale: tuple[float, float] | None = None
    sm_scale: float | None = 0.2
    packed: bool = False
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: bool = False
    out_dtype: torch.dtype | None = None
    planner: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name


_LATENT_512: dict[str, Any] = {"dtype": torch.bfloat16, "page_size": 64, "sm_scale": None}

CASES = (
    Mla("base"),
    Mla("causal", causal=True),
    Mla("FP8 output", out_dtype=torch.float8_e4m3fn),
    Mla("FP8 output of 512/64", out_dtype=torch.float8_e4m3fn, dims=(512, 64), **_LATENT_512),
    Mla("default scale", dims=(512, 64), sm_scale=None, causal=True),
    Mla("named scale", dims=(512, 64)),
    Mla("row_max rises", dims=(512, 64), kv_lens=(330, 3, 200, 470), **_LATENT_512 | {"sm_scale": 0.5}),
    Mla("no RoPE part", dims=(32, 0), causal=True),
    Mla("packed", packed=True, causal=True, page_size=3),
    Mla("decode", qo_lens=(1, 1, 1, 1), page_size=1),
    Mla("no queries", qo_lens=(0, 0, 0, 0)),
    Mla("no keys", kv_lens=(0, 0, 0, 0)),
    Mla("window", causal=True, window_left=20),
    Mla("cap", logits_soft_cap=2.0),
    Mla("sinks", sinks=True),
    Mla("float16", dtype=torch.float16),
    Mla("bfloat16", dtype=torch.bfloat16, causal=True),
    Mla("many heads", heads=150, planner={"tile_rows": 2}),
    *(
        Mla(name, qo_lens, kv_lens, (512, 64), **(_LATENT_512 | options))
        for name, qo_lens, kv_lens, options in (
            ("512/64 decode", (1, 1, 0, 1), (70, 300, 0, 1000), {"heads": 128, "planner": {"num_ctas": 12}}),
            (
                "512/64 decode, whole",
                (1, 1, 1),
                (64, 1, 129),
                {"heads": 80, "dtype": torch.float16, "planner": {"num_ctas": 0}},
            ),
            ("512/64 decode, 150 heads", (1, 1), (70, 200), {"heads": 150, "causal": True, "planner": {"num_ctas": 4}}),
            ("512/64 rows", (3, 2, 5), (200, 2, 64), {"heads": 16, "planner": {"tile_rows": 4}}),
            (
                "512/64 causal",
                (3, 1, 70),
                (200, 2, 310),
                {"heads": 16, "causal": True, "packed": True, "page_size": 128},
            ),
            ("512/64 causal, split", (4, 1), (900, 0), {"heads": 20, "causal": True, "planner": {"num_ctas": 6}}),
            (
                "512/64 causal, fixed split",  # a split begins after every key that the first rows of its tile see
                (8, 6),
                (130, 195),
                {"heads": 16, "causal": True, "planner": {"tile_rows": 8, "fixed_split_size": 1}},
            ),
        )
    ),
    Mla("fp8", dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, kv_scale=(0.5, 2.0), packed=True),
)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged_cache(case: Mla, tokens: list[Tensor], table: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """``[pages, page_size, ckv + kpe]``, NaN where there is no token."""
    cache = torch.full((len(table[1]) + 1, case.page_size, sum(case.dims)), math.nan)
    for b, request in enumerate(tokens):
        for t, token in enumerate(request.float()):
            cache[table[1][table[0][b] + t // case.page_size], t % case.page_size] = token
    return cache.to(dtype)


def check(case: Mla, device: str = "cpu", backend: str = "auto", op: Callable[..., Any] | None = None) -> None:
    """Run the case and compare the result with the oracle. ``op`` is called in place of the registered one."""
    ckv_dim, kpe_dim = case.dims
    width, dtype = ckv_dim + kpe_dim, case.kv_dtype or case.dtype
    tokens = [random_tensor((n, width), dtype, 10 + b) for b, n in enumerate(case.kv_lens)]
    table = page_table(case.kv_lens, case.page_size)
    cache = paged_cache(case, tokens, table, dtype).to(device)
    ckv, kpe = cache.split(case.dims, -1)
    if not case.packed:
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    q = random_tensor((sum(case.qo_lens), case.heads, width), case.dtype, 1).to(device)
    sinks = random_tensor((case.heads,), torch.float32, 2).to(device) if case.sinks else None
    planner = attn_ops.PrefillPlanner(
        len(case.kv_lens),
        max(1, sum(case.qo_lens)),
        max(1, len(table[1])),
        page_size=case.page_size,
        num_qo_heads=case.heads,
        num_kv_heads=1,
        head_dim=width,
        head_dim_vo=ckv_dim,
        causal=case.causal,
        device=device,
        **case.planner,
    )
    plan = planner.plan(indptr(case.qo_lens), *table)
    options: dict[str, Any] = {
        "sm_scale": case.sm_scale,
        "causal": case.causal,
        "window_left": case.window_left,
        "logits_soft_cap": case.logits_soft_cap,
        "sinks": sinks,
    }
    k_scale, v_scale = case.kv_scale or (1.0, 1.0)
    requests = [
        (rows, t.double()[:, None] * k_scale, t.double()[:, None, :ckv_dim] * v_scale)
        for rows, t in zip(q.split(case.qo_lens), tokens, strict=True)
    ]
    exact = options | {"sm_scale": 1 / math.sqrt(128 + 64) if case.sm_scale is None else case.sm_scale}
    eps = 0.0 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps
    expected = Expected.of(requests, **exact)
    for name in CPU_BACKENDS if backend == "reference" else (backend,):
        out, lse = (op or torch.ops.attn.batch_mla)(
            q[..., :ckv_dim],
            q[..., ckv_dim:],
            ckv,
            kpe,
            plan,
            planner.workspace,
            kv_scale=None if case.kv_scale is None else torch.tensor(case.kv_scale, device=device),
            return_lse=True,
            out_dtype=case.out_dtype,
            backend=name,
            **options,
        )
        assert out.dtype == (case.out_dtype or case.dtype)
        expected.check(out, lse, eps=eps)
