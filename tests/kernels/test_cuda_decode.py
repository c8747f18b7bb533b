"""The host side of the CUDA decode kernel, and what the compiler makes of it, without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # for its disassembler

from helpers.cases import Case
from helpers.cuda_kernels import check_syntax, disassembly, needs_nvrtc, usage_of
from helpers.fake_driver import FakeDriver, needs_the_module
from helpers.harness import Setup

from attn_ops.kernels.cuda import compile as compile_module
from attn_ops.kernels.cuda import decode, operands
from attn_ops.kernels.cuda.kernel import Specialization
from attn_ops.ops import cuda_kernels, unsupported
from attn_ops.ops.backends import MemoryLayout, Problem
from attn_ops.ops.cuda_kernels import DecodeKey

SHARED_PER_CTA, SHARED_PER_SM, RESERVED_PER_CTA = 227 << 10, 228 << 10, 1 << 10
REGISTERS_PER_THREAD = {(1, False): 168, (2, False): 96, (1, True): 128, (2, True): 80}
"""KV heads of a CTA, and RoPE -> with which three of its 9, five of 17, four of 13 or six of 21 warps fit in the
register file of a quarter of an SM."""

KEYS = list(decode.SPECIALIZATIONS)


@needs_nvrtc
@pytest.mark.parametrize("key", [key for key in KEYS if key[3] == torch.float16], ids=str)
def test_sizes_are_those_of_the_source(key: DecodeKey) -> None:
    """The compiler evaluates the source's constants and the size of its struct."""
    (dim, kv_heads, packed_rows, _, fp8, rope, _), one = key, decode.SPECIALIZATIONS[key]
    expected = {
        "sizeof(Shared)": -(-decode.shared_bytes(key) // 1024) * 1024,
        "kTile": decode.tile_tokens(dim, kv_heads, fp8 is not None),
        "kTileBytes": decode.TILE_BYTES,
        "kStages": decode.stages(rope),
        "kThreads": one.threads,
        "kPackedRows": packed_rows,
        "kRowBytes": min(dim * (2 if fp8 is None else 1), operands.ROW_BYTES),
        **dict(zip(("kFloat32", "kFloat16", "kBFloat16", "kE4M3", "kE5M2"), operands.OUT_TYPES.values(), strict=True)),
    }
    check_syntax(one, "".join(f'static_assert({name} == {value}, "{name}");\n' for name, value in expected.items()))
    with pytest.raises(compile_module.CompilerError, match="static assertion failed"):
        check_syntax(one, 'static_assert(kTile == 1, "");\n')


@needs_nvrtc
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_one_cta_fits_on_an_sm_and_registers_suffice(key: DecodeKey) -> None:
    used = usage_of(decode.SPECIALIZATIONS[key])
    assert used.shared <= SHARED_PER_CTA
    assert 2 * (used.shared + RESERVED_PER_CTA) > SHARED_PER_SM
    assert used.registers <= REGISTERS_PER_THREAD[key.kv_heads, key.rope]
    # Four words, outside of the mainloop: see the next test.
    assert used.stack <= (16 if key.padded and key.fp8 and (key.kv_heads, key.packed_rows) == (1, 8) else 0)


@needs_nvrtc
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_kv_tile_takes_the_products_of_its_packed_rows(key: DecodeKey) -> None:
    """Of a consumer warp. No product waits for the one before it, and nothing is spilled in the mainloop."""
    (dim, kv_heads, packed_rows, _, fp8, *_), code = key, disassembly(decode.SPECIALIZATIONS[key])
    tokens = decode.tile_tokens(dim, kv_heads, fp8 is not None)
    products = [m.start() for m in re.finditer(r"\bHGMMA\.64x(\d+)x16", code)]
    assert set(re.findall(r"\bHGMMA\.64x(\d+)x16", code)) == {str(packed_rows)}
    assert len(products) == 2 * (tokens // 64) * (dim // 16)
    assert len(re.findall(r"\bLDSM\b", code)) == (0 if fp8 is None else 2 * tokens * dim // 2048)
    assert not re.search(r"\b(LDL|STL)\b", code[products[0] : products[-1]])


@needs_nvrtc
@needs_the_module
@pytest.mark.parametrize(
    ("dim", "kv_heads", "grid", "threads", "fp8", "sms"),
    [
        (128, 2, [2, 7, 1], 288, False, 13),
        (128, 2, [2, 7, 1], 288, True, 14),
        (128, 2, [1, 7, 1], 544, True, 13),
        (128, 3, [3, 7, 1], 288, True, 13),
        (64, 2, [1, 7, 1], 544, False, 132),
        (64, 6, [3, 7, 1], 544, True, 132),
        (64, 3, [3, 7, 1], 288, False, 132),
    ],
)
def test_the_grid_is_kv_heads_by_ctas_of_the_plan(
    dim: int,
    kv_heads: int,
    grid: list[int],
    threads: int,
    fp8: bool,
    sms: int,
    fake_driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CTA has two, if their number is even: of 64, and of 128 with an FP8 cache if one each do not run at once."""
    grids: list[tuple[Any, ...]] = []
    launch = decode.launch

    def spy(one: Specialization, grid: Any, **arguments: Any) -> None:
        launch(one, grid, **arguments)
        grids.append((fake_driver.array("grid", 3), fake_driver.get("threads"), fake_driver.get("pdl")))

    monkeypatch.setattr(decode, "launch", spy)
    monkeypatch.setattr(decode, "is_eager", lambda q: True)
    monkeypatch.setattr(cuda_kernels, "num_sms", lambda device: sms)
    sizes: dict[str, Any] = {"kv_lens": (700, 20), "heads": (4 * kv_heads, kv_heads), "planner": {"num_ctas": 7}}
    kv_dtype = torch.float8_e4m3fn if fp8 else None
    case = Case("launch", dtype=torch.bfloat16, head_dims=(dim, dim), kv_dtype=kv_dtype, **sizes)
    arguments = Setup("decode", case).arguments
    tensors = [arguments.pop(name) for name in ("q", "k_cache", "v_cache", "plan", "workspace")]
    decode.batch_decode(*tensors, **arguments)
    assert grids == [(grid, threads, 1)]


GOOD = Problem(
    op="batch_decode",
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim_qk=128,
    head_dim_vo=128,
    page_size=16,
)


ROPE: dict[str, Any] = {"options": ("pos_encoding",), "pos_encoding": "ROPE_LLAMA"}
F16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TAKEN: list[tuple[dict[str, Any], tuple[Any, ...] | list[tuple[Any, ...]]]] = [
    ({}, (128, 1, 8, BF16, None)),
    ({"num_qo_heads": 16}, (128, 1, 8, BF16, None)),
    ({"num_qo_heads": 18}, (128, 1, 16, BF16, None)),
    ({"num_qo_heads": 32}, (128, 1, 16, BF16, None)),
    ({"dtype": F16, "kv_dtype": F16, "head_dim_qk": 64, "head_dim_vo": 64}, (64, 2, 8, F16, None)),
    ({"num_qo_heads": 15, "num_kv_heads": 5, "head_dim_qk": 64, "head_dim_vo": 64}, (64, 1, 8, BF16, None)),
    ({"kv_dtype": E4M3}, [(128, 1, 8, F16, E4M3), (128, 2, 8, F16, E4M3)]),
    ({"dtype": F16, "kv_dtype": E5M2}, [(128, 1, 8, F16, E5M2), (128, 2, 8, F16, E5M2)]),
    ({"num_qo_heads": 12, "num_kv_heads": 3, "kv_dtype": E4M3}, (128, 1, 8, F16, E4M3)),
    ({"page_size": 64}, (128, 1, 8, BF16, None)),
    ({"page_size": 272}, (128, 1, 8, BF16, None)),
    ({"out_dtype": E4M3, "options": tuple(sorted(unsupported.CUDA_DECODE_OPTIONS))}, (128, 1, 8, BF16, None)),
    ({"context_ranks": 2}, (128, 1, 8, BF16, None)),
    ({"head_dim_qk": 96, "head_dim_vo": 96}, (128, 1, 8, BF16, None, False, True)),
    (
        {"head_dim_qk": 80, "head_dim_vo": 80, "kv_dtype": E4M3},
        [(128, 1, 8, F16, E4M3, False, True), (128, 2, 8, F16, E4M3, False, True)],
    ),
    (ROPE, (128, 1, 8, BF16, None, True)),
    (ROPE | {"dtype": F16, "kv_dtype": F16, "head_dim_qk": 64, "head_dim_vo": 64}, (64, 2, 8, F16, None, True)),
]


@pytest.mark.parametrize(("fields", "key"), TAKEN, ids=str)
def test_calls_that_it_runs(
    fields: dict[str, Any], key: tuple[Any, ...] | list[tuple[Any, ...]], on_hopper: list[Specialization]
) -> None:
    """Over an FP8 cache a CTA may have one KV head of 128 or two, by the plan."""
    assert unsupported.cuda_decode(replace(GOOD, **fields)) == []
    keys = key if isinstance(key, list) else [key]
    assert on_hopper == [decode.SPECIALIZATIONS[DecodeKey(*one)] for one in keys]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": torch.device("cpu")}, "it runs on cuda, not cpu"),
    ({"dtype": torch.float32, "kv_dtype": torch.float32}, "torch.float32 is not a 16-bit dtype"),
    ({"kv_dtype": torch.float16}, "the cache is torch.float16, neither torch.bfloat16 nor FP8"),
    ({"head_dim_qk": 72, "head_dim_vo": 72}, "head dimensions 72 and 72 have no tile"),
    (ROPE | {"head_dim_qk": 96, "head_dim_vo": 96}, "it does not implement RoPE with head dimension 96"),
    ({"head_dim_qk": 256, "head_dim_vo": 256}, "head dimensions 256 and 256 have no tile"),
    ({"head_dim_qk": 128, "head_dim_vo": 64}, "head dimensions 128 and 64 have no tile"),
    ({"page_size": 12}, "pages of 12 tokens are not multiples of 16"),
    ({"page_size": 24}, "pages of 24 tokens are not multiples of 16"),
    ({"num_qo_heads": 34}, "it needs at most 16 query heads per KV head"),
    ({"layout": MemoryLayout(aligned=False)}, "rows are not aligned to 16 bytes"),
    ({"layout": MemoryLayout(mappable=False)}, unsupported.UNMAPPABLE),
    ({"layout": MemoryLayout(joinable=False)}, unsupported.UNJOINABLE),
    ({"options": ("pos_encoding",), "pos_encoding": "ALIBI"}, "it does not implement pos_encoding"),
    (ROPE | {"kv_dtype": torch.float8_e4m3fn}, "it does not implement RoPE with an FP8 cache"),
    (ROPE | {"context_ranks": 2}, "it does not implement pos_encoding on the keys of one rank"),
    (
        {"options": ("window_left",), "context_ranks": 2},
        "it does not implement window_left on the keys of one rank",
    ),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_reasons_one_by_one(fields: dict[str, Any], reason: str, on_hopper: list[Specialization]) -> None:
    assert unsupported.cuda_decode(replace(GOOD, **fields)) == [reason]
    assert not on_hopper  # nothing is compiled for a call that another kernel runs


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), None])
def test_other_gpus_are_refused(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, on_hopper: list[Specialization]
) -> None:
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: capability)
    assert unsupported.cuda_decode(GOOD) == [f"it needs compute capability 9.0, not {capability}"]
    assert not on_hopper
