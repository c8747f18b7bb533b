"""The host side of the CUDA decode kernel, and what the compiler makes of it, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # for its disassembler

from attn_ops.kernels.cuda import combine_decode, decode, operands
from attn_ops.kernels.cuda import compile as compile_module
from attn_ops.kernels.cuda.kernel import Specialization
from helpers.cases import Case
from helpers.cuda_kernels import check_syntax, disassembly, needs_nvrtc, usage_of
from helpers.fake_driver import FakeDriver, needs_the_module
from helpers.harness import Setup

from attn_ops.eager import prepared_call
from attn_ops.ops import unsupported
from attn_ops.ops.backends import MemoryLayout, Problem

CTAS_PER_SM = 2
SHARED_PER_SM, RESERVED_PER_CTA = 228 << 10, 1 << 10
REGISTERS_PER_THREAD = 168
"""With which ten warps fit in the register files of the four parts of an SM."""

SPILL_BYTES = {None: 0, torch.float8_e4m3fn: 16, torch.float8_e5m2: 16}
"""By dtype of an FP8 cache, outside of the mainloop: of a thread with 16 heads of 128."""

KEYS = list(decode.SPECIALIZATIONS)


@needs_nvrtc
@pytest.mark.parametrize("key", [key for key in KEYS if key[2] == torch.float16], ids=str)
def test_sizes_are_those_of_the_source(key: tuple[Any, ...]) -> None:
    """The compiler evaluates the source's constants and the size of its struct."""
    (dim, heads, _, fp8), one = key, decode.SPECIALIZATIONS[key]
    expected = {
        "sizeof(Shared)": one.shared_bytes,
        "kTile": decode.tile_tokens(dim, fp8 is not None),
        "kTileBytes": decode.TILE_BYTES,
        "kStages": decode.STAGES,
        "kThreads": decode.THREADS,
        "kHeads": heads,
        "kRowBytes": min(dim * (2 if fp8 is None else 1), operands.ROW_BYTES),
        **dict(zip(("kFloat32", "kFloat16", "kBFloat16", "kE4M3", "kE5M2"), operands.OUT_TYPES.values(), strict=True)),
    }
    check_syntax(one, "".join(f'static_assert({name} == {value}, "{name}");\n' for name, value in expected.items()))
    with pytest.raises(compile_module.CompilerError, match="static assertion failed"):
        check_syntax(one, 'static_assert(kTile == 1, "");\n')


@needs_nvrtc
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_two_ctas_fit_on_an_sm(key: tuple[Any, ...]) -> None:
    one = decode.SPECIALIZATIONS[key]
    used = usage_of(one)
    assert CTAS_PER_SM * (used.shared + RESERVED_PER_CTA) <= SHARED_PER_SM
    assert used.registers <= REGISTERS_PER_THREAD
    assert used.stack <= SPILL_BYTES[key[3]]


@needs_nvrtc
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_kv_tile_takes_no_more_instructions_than_its_products_need(key: tuple[Any, ...]) -> None:
    """Of a warp. Nothing is spilled in the mainloop, which no barrier of threads interrupts."""
    (dim, heads, _, fp8), code = key, disassembly(decode.SPECIALIZATIONS[key])
    tokens, size = decode.tile_tokens(dim, fp8 is not None) // 4, 2 if fp8 is None else 1
    assert len(re.findall(r"\bHMMA\b", code)) == 2 * (tokens // 16) * (dim // 16) * (heads // 8)
    assert len(re.findall(r"\bLDSM\b", code)) == 2 * tokens * dim * size // 512
    products = [m.start() for m in re.finditer(r"\bHMMA\b", code)]
    mainloop = code[products[0] : products[-1]]
    assert not re.search(r"\b(LDL|STL|BAR)\b", mainloop)


@needs_nvrtc
def test_the_combine_keeps_its_loads_in_flight() -> None:
    """The eight partial results of a lane are requested before the wait for them, and nothing is spilled."""
    (one,) = combine_decode.SPECIALIZATIONS.values()
    code = disassembly(one)
    assert usage_of(one).stack == 0
    copies = [m.start() for m in re.finditer(r"LDGSTS\.E\.BYPASS\.128", code)]
    assert len(copies) == 8
    assert not re.search(r"DEPBAR|MUFU\.EX2", code[copies[0] : copies[-1]])


@needs_nvrtc
@needs_the_module
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_the_grid_is_kv_heads_by_ctas_of_the_plan(
    kv_dtype: torch.dtype | None, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[Any, ...]] = []
    for module in (decode, combine_decode):
        launch = module.launch

        def spy(one: Specialization, grid: Any, *, launch: Any = launch, **arguments: Any) -> None:
            launch(one, grid, **arguments)
            grids.append((fake_driver.array("grid", 3), fake_driver.get("threads"), fake_driver.get("pdl")))

        monkeypatch.setattr(module, "launch", spy)
    case = Case(
        "launch",
        kv_lens=(700, 20),
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        heads=(8, 2),
        head_dims=(128, 128),
        planner={"num_ctas": 7},
    )
    arguments = Setup("decode", case).arguments
    tensors = [arguments.pop(name) for name in ("q", "k_cache", "v_cache", "plan", "workspace")]
    decode.batch_decode(*tensors, **arguments)
    assert grids == [([2, 7, 1], 160, 1), ([2 * 8 * 4, 1, 1], 32, 1)]


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


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Specialization]]:
    """Every kernel compiles. The list gets those that are compiled."""
    compiled: list[Specialization] = []
    monkeypatch.setattr(compile_module, "unavailable_reason", lambda *ones: compiled.extend(ones) or "")
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(prepared_call, "is_available", lambda: True)
    return compiled


F16, BF16, E4M3, E5M2 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TAKEN: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({}, (128, 8, BF16, None)),
    ({"num_qo_heads": 16}, (128, 8, BF16, None)),
    ({"num_qo_heads": 18}, (128, 16, BF16, None)),
    ({"num_qo_heads": 32}, (128, 16, BF16, None)),
    ({"dtype": F16, "kv_dtype": F16, "head_dim_qk": 64, "head_dim_vo": 64}, (64, 8, F16, None)),
    ({"kv_dtype": E4M3}, (128, 8, F16, E4M3)),
    ({"dtype": F16, "kv_dtype": E5M2}, (128, 8, F16, E5M2)),
    ({"page_size": 8}, (128, 8, BF16, None)),
    ({"page_size": 264}, (128, 8, BF16, None)),
    ({"out_dtype": E4M3, "options": tuple(sorted(unsupported.CUDA_DECODE_OPTIONS))}, (128, 8, BF16, None)),
    ({"context_ranks": 2}, (128, 8, BF16, None)),
]


@pytest.mark.parametrize(("fields", "key"), TAKEN, ids=str)
def test_calls_that_it_runs(fields: dict[str, Any], key: tuple[Any, ...], on_hopper: list[Specialization]) -> None:
    assert unsupported.cuda_decode(replace(GOOD, **fields)) == []
    assert on_hopper == [decode.SPECIALIZATIONS[key], *combine_decode.SPECIALIZATIONS.values()]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": torch.device("cpu")}, "it runs on cuda, not cpu"),
    ({"dtype": torch.float32, "kv_dtype": torch.float32}, "torch.float32 is not a 16-bit dtype"),
    ({"kv_dtype": torch.float16}, "the cache is torch.float16"),
    ({"head_dim_qk": 96, "head_dim_vo": 96}, "head dimensions 96 and 96 have no tile"),
    ({"head_dim_qk": 128, "head_dim_vo": 64}, "head dimensions 128 and 64 have no tile"),
    ({"page_size": 12}, "pages of 12 tokens are not multiples of 8"),
    ({"num_qo_heads": 34}, "it needs at most 16 query heads per KV head"),
    ({"layout": MemoryLayout(aligned=False)}, "rows are not aligned to 16 bytes"),
    ({"layout": MemoryLayout(mappable=False)}, unsupported.UNMAPPABLE),
    ({"layout": MemoryLayout(joinable=False)}, unsupported.UNJOINABLE),
    ({"options": ("pos_encoding",)}, "it does not implement pos_encoding"),
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
