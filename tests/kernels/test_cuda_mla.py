"""The host side of the CUDA MLA kernel, and what the compiler makes of it, without a GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # whose kernel combines partial results, and for its disassembler

from helpers.cuda_kernels import check_syntax, disassemble, disassembly, needs_nvrtc, usage_of
from helpers.fake_driver import FakeDriver, needs_the_module
from helpers.packaged_calls import packaged_image
from helpers.tensors import tensor_of_map
from torch import Tensor

import attn_ops
from attn_ops.kernels.cuda import compile as compile_module
from attn_ops.kernels.cuda import mla, prefill
from attn_ops.kernels.cuda.kernel import Specialization
from attn_ops.kernels.cuda.operands import COLUMNS
from attn_ops.ops import unsupported
from attn_ops.ops.backends import MemoryLayout, Problem
from attn_ops.ops.options import FP8

SPILL_BYTES = 16, 40, 48
"""Of a thread that may be spilled: values needed again after a loop. With FP8 more for a merge or for copies by
tokens, and for both."""


def _numbered(*shape: int) -> Tensor:
    """A tensor whose elements are their addresses."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def _is_valid(one: Any, itemsize: int = 2) -> bool:
    """What the driver asks of a map: sizes of boxes, and strides of 16 bytes."""
    within = all(0 < b <= 256 for b in one.box) and one.box[-1] * itemsize == one.swizzle
    aligned = all(s * itemsize % 16 == 0 for s in one.strides[:-1])
    return within and len(one.shape) <= 5 and one.strides[-1] == 1 and aligned


@pytest.mark.parametrize(
    ("heads", "packed_rows"),
    [*((heads, 64) for heads in (1, 2, 16, 64, 128, 192)), (1, 16), (8, 16), (16, 16)],
)
@pytest.mark.parametrize("padding", [0, 8])
def test_a_box_of_queries_is_a_group_of_packed_rows(heads: int, packed_rows: int, padding: int) -> None:
    rows = 200
    q = _numbered(rows, heads, mla.LATENT + padding)[..., : mla.LATENT]
    one, boxed = mla.query_map(q, packed_rows)
    assert boxed
    assert _is_valid(one)
    assert one.box[1] * one.box[2] == packed_rows
    mapped = tensor_of_map(one)
    for first_packed_row in (0, packed_rows, 2 * packed_rows):
        row, head = 1 + first_packed_row // heads, first_packed_row % heads
        box = mapped[:, row : row + one.box[1], head : head + one.box[2]]
        packed = box.permute(1, 2, 0, 3).reshape(packed_rows, mla.LATENT)
        for p in range(packed_rows):
            of_item = first_packed_row + p
            assert torch.equal(packed[p], q[1 + of_item // heads, of_item % heads])


@pytest.mark.parametrize(("heads", "packed_rows"), [(3, 64), (20, 64), (80, 64), (150, 64), (3, 16), (12, 16)])
def test_other_head_counts_are_copied(heads: int, packed_rows: int) -> None:
    one, boxed = mla.query_map(_numbered(4, heads, mla.LATENT), packed_rows)
    assert not boxed
    assert _is_valid(one)


@pytest.mark.parametrize(
    ("columns", "itemsize", "box"),
    [(512, 2, (64, 64)), (64, 2, (64, 64)), (512, 1, (64, 128)), (64, 1, (16, 64))],
)
def test_a_map_of_the_cache_has_every_token(columns: int, itemsize: int, box: tuple[int, int]) -> None:
    cache = _numbered(5, 128, 576)[..., 576 - columns :]
    one = mla.cache_map(cache, itemsize)
    assert _is_valid(one, itemsize)
    assert one.box == (1, *box)
    assert torch.equal(tensor_of_map(one), cache)


UNITS = {
    1: ("mla_swap_ab", 16, 1),
    16: ("mla_swap_ab", 16, 1),
    17: ("mla", 64, 1),
    64: ("mla", 64, 1),
    65: ("mla", 128, 1),
    128: ("mla", 128, 1),
    150: ("mla", 64, 3),
    256: ("mla", 128, 2),
}
"""By the packed rows of a work item."""


@pytest.mark.parametrize(("packed_rows", "expected"), UNITS.items())
def test_units_have_the_fewest_rows_and_two_ctas_unless_one_would_have_none(
    packed_rows: int, expected: tuple[str, int, int]
) -> None:
    assert mla.units_of(packed_rows) == expected


def test_units_without_swapped_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "cuda_mla_swapped_rows", lambda *_: ())
    assert {mla.units_of(packed_rows) for packed_rows in (1, 16, 64)} == {("mla", 64, 1)}


def test_ctas_share_no_tiles_that_are_copied_by_tokens() -> None:
    assert [mla.units_of(packed_rows, by_tokens=True)[1:] for packed_rows in (64, 128, 150)] == [
        (64, blocks) for blocks in (1, 2, 3)
    ]


def test_operands_of_32_packed_rows_are_swapped_where_a_16_bit_cache_is_copied_by_tokens() -> None:
    for fp8, by_tokens in itertools.product((False, True), repeat=2):
        swapped = [rows for rows in range(1, 65) if mla.units_of(rows, fp8, by_tokens).kernel == "mla_swap_ab"]
        assert swapped == [*range(1, 33 if by_tokens and not fp8 else 17)]
    assert [mla.units_of(rows, False, True).rows for rows in (16, 17, 32, 33)] == [16, 32, 32, 64]


@needs_nvrtc
@pytest.mark.parametrize("key", [k for k in mla.SPECIALIZATIONS if k[3] == torch.bfloat16], ids=str)
def test_sizes_are_those_of_the_source(key: tuple[Any, ...]) -> None:
    """The compiler evaluates the source's constants and the size of its struct."""
    one = mla.SPECIALIZATIONS[key]
    units = mla.Units(key[0], key[1], 1)
    expected = {
        "kPackedRows": units.box_rows,
        "sizeof(Shared)": one.shared_bytes,
        "kLatent": mla.LATENT,
        "kTile": mla.TILE,
        "kUnitRows": key[1],
        "kRowBytes": 2 * COLUMNS,
        "kBlocks": (mla.LATENT + mla.ROTARY) // COLUMNS,
        "kQueryBoxBlocks": mla.QUERY_BOX_BLOCKS,
        "kConverterWarps": mla.CONVERTER_WARPS if key[4] else 0,
        "kLikeOperands": 0,
        **dict(zip(("kFloat32", "kFloat16", "kBFloat16", "kE4M3", "kE5M2"), prefill.OUT_TYPES.values(), strict=True)),
    }
    checks = "".join(f'static_assert({name} == {value}, "{name}");\n' for name, value in expected.items())
    check_syntax(one, checks)
    with pytest.raises(compile_module.CompilerError, match="static assertion failed"):
        check_syntax(one, 'static_assert(kTile == 1, "");\n')


@pytest.fixture(scope="module")
def disassembled() -> None:
    disassemble(mla.SPECIALIZATIONS.values())


@needs_nvrtc
@pytest.mark.usefixtures("disassembled")
@pytest.mark.parametrize("key", mla.SPECIALIZATIONS, ids=str)
def test_registers_suffice_and_products_overlap(key: tuple[Any, ...]) -> None:
    """Where the assembler does not see that products can overlap, it adds waits between them."""
    one = mla.SPECIALIZATIONS[key]
    assert usage_of(one).stack <= SPILL_BYTES[(key[2] > 1) + key[5] if key[4] else 0]
    code = disassembly(one)
    waits = re.findall(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\d)", code)
    keys_first = ["0", "0", "1", "0", "0", "0"]  # a first tile; S, peer's P V, own P V; the peer's last tile
    keys_last = ["0", "0", "2", "0", "0", "0"]
    swapped = ["0", "1", "0"]  # S; each half of the values
    # No consumer takes keys first that are converted or copied token by token.
    of_consumers = [keys_last if key[4] or key[5] else keys_first, keys_last]
    assert sorted([waits[:6], waits[6:]]) == of_consumers if key[0] == "mla" else waits == swapped
    assert ("STAS.128" in code) == (key[2] > 1)  # asynchronous stores to other CTAs
    assert "UBLKCP" in code  # bulk stores
    assert ("UTMALDG.3D.MULTICAST" in code) == (key[1] > 64)


SMS = 132


def _call(
    rows: int = 9,
    heads: int = 128,
    page_size: int = 64,
    tile_rows: int | None = None,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    sizes = {"page_size": page_size, "num_qo_heads": heads, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512}
    planner = attn_ops.PrefillPlanner(5, 1000, 40, num_ctas=6, tile_rows=tile_rows, **sizes)
    q_nope, q_pe = torch.zeros(rows, heads, 576, dtype=torch.bfloat16).split((512, 64), -1)
    ckv, kpe = torch.zeros(10, page_size, 576).to(kv_dtype).split((512, 64), -1)
    tensors = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe, "plan": list(planner.state)}
    return tensors | {"workspace": planner.workspace}


@pytest.fixture
def without_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "combine_split_tiles", lambda *args, **_: None)
    monkeypatch.setattr(mla, "num_sms", lambda device: SMS)


@needs_nvrtc
@needs_the_module
@pytest.mark.usefixtures("without_combine")
@pytest.mark.parametrize(
    ("heads", "tile_rows", "splits", "page_size"),
    [
        *((*sizes, 64) for sizes in ((128, 1, 1), (16, 4, 1), (16, 1, 2), (32, 1, 2), (80, 3, 1), (192, 1, 2))),
        *((*sizes, 32) for sizes in ((128, 1, 1), (16, 4, 1), (80, 3, 1), (32, 1, 2), (64, 1, 2))),
    ],
)
def test_a_launch_has_a_cluster_for_each_unit_up_to_the_sms(
    heads: int, tile_rows: int, splits: int, page_size: int, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: splits)
    for rows in (0, 1, 9, 700):
        call = _call(rows, heads, page_size, tile_rows=tile_rows)
        mla.batch_mla(**call)
        kernel, unit_rows, blocks = mla.units_of(tile_rows * heads, by_tokens=page_size == 32)
        one = mla.SPECIALIZATIONS[kernel, unit_rows, splits, torch.bfloat16, False, page_size == 32]
        units, cluster = (-(-rows // tile_rows) + 5 + 6) * blocks, one.cluster[0]
        assert fake_driver.array("grid", 3) == [min(units, SMS // cluster) * cluster, 1, 1]
        settings = [fake_driver.get(name) for name in ("threads", "shared", "pdl")]
        assert settings == [one.threads, one.shared_bytes, 1]


@needs_nvrtc
@needs_the_module
@pytest.mark.usefixtures("without_combine")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("heads", "function"), [(128, "mla"), (12, "mla_swap_ab")])
@pytest.mark.parametrize("page_size", [64, 1])
def test_a_package_takes_any_number_of_rows(
    heads: int,
    function: str,
    kv_dtype: torch.dtype,
    page_size: int,
    fake_driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced for 50 rows, the integers of a call are those of an eager launch for any number."""
    fixed = _call(50, heads, page_size, tile_rows=1, kv_dtype=kv_dtype)
    if kv_dtype in FP8:
        fixed["kv_scale"] = torch.tensor([0.5, 2.0])

    def call(rows: Tensor) -> Tensor:
        q = {name: rows.new_zeros(rows.shape[0], heads, n) for name, n in (("q_nope", 512), ("q_pe", 64))}
        return mla.batch_mla(**fixed | q, causal=True)[0]

    image = packaged_image(call, (50, 7, 900), monkeypatch)
    assert (image.function, len(image.maps)) == (function, 4 if page_size == 64 else 2)


GOOD = Problem(
    op="batch_mla",
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    num_qo_heads=128,
    num_kv_heads=1,
    head_dim_qk=576,
    head_dim_vo=512,
    page_size=64,
)


TAKEN: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16, "kv_dtype": torch.float16},
    {"page_size": 192},
    {"page_size": 1, "layout": MemoryLayout(mappable=False)},
    {"page_size": 96, "kv_dtype": torch.float8_e4m3fn},
    {"num_qo_heads": 3},
    {"layout": MemoryLayout(joinable=False)},
    {"out_dtype": torch.float8_e4m3fn, "options": ("out_dtype",)},
    {"options": tuple(sorted(unsupported.CUDA_MLA_OPTIONS))},
    {"kv_dtype": torch.float8_e4m3fn, "options": tuple(sorted(unsupported.CUDA_MLA_OPTIONS | {"kv_scale"}))},
    {"dtype": torch.float16, "kv_dtype": torch.float8_e5m2, "num_qo_heads": 5},
]


@pytest.mark.parametrize("fields", TAKEN, ids=str)
def test_calls_that_it_runs(fields: dict[str, Any], on_hopper: list[Specialization]) -> None:
    problem = replace(GOOD, **fields)
    assert unsupported.cuda_mla(problem) == []
    assert on_hopper == [
        one
        for key, one in mla.SPECIALIZATIONS.items()
        if key[3:] == (problem.dtype, problem.kv_dtype in FP8, problem.page_size % 64 != 0)
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": torch.device("cpu")}, "it runs on cuda, not cpu"),
    ({"kv_dtype": torch.float16}, "the cache is torch.float16, neither torch.bfloat16 nor FP8"),
    ({"dtype": torch.float32, "kv_dtype": torch.float32}, "torch.float32 is not a 16-bit dtype"),
    ({"head_dim_qk": 320, "head_dim_vo": 256}, "the head is not 512 + 64 wide"),
    ({"layout": MemoryLayout(aligned=False)}, "rows are not aligned to 16 bytes"),
    ({"layout": MemoryLayout(mappable=False)}, unsupported.UNMAPPABLE),
    ({"options": ("window_left",)}, "it does not implement window_left"),
    ({"options": ("logits_soft_cap",)}, "it does not implement logits_soft_cap"),
    ({"options": ("sinks",)}, "it does not implement sinks"),
    ({"options": ("kv_scale",)}, "it does not implement kv_scale"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_reasons_one_by_one(fields: dict[str, Any], reason: str, on_hopper: list[Specialization]) -> None:
    assert unsupported.cuda_mla(replace(GOOD, **fields)) == [reason]
    assert not on_hopper  # nothing is compiled for a call that another kernel runs


def test_without_triton_nothing_combines(monkeypatch: pytest.MonkeyPatch, on_hopper: list[Specialization]) -> None:
    monkeypatch.setattr(unsupported, "triton_installed", lambda: False)
    (reason,) = unsupported.cuda_mla(GOOD)
    assert reason == "triton, whose kernel combines its partial results, is not installed"
    assert not on_hopper
