"""The host side of the CUDA prefill kernel, and what the compiler makes of it, without a GPU."""

from __future__ import annotations

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
from attn_ops.kernels.cuda import kernel as kernel_module
from attn_ops.kernels.cuda import prefill
from attn_ops.kernels.cuda.kernel import Specialization
from attn_ops.kernels.cuda.operands import GROUP_TOKENS, ROW_BYTES, Columns, box_of_pages
from attn_ops.kernels.triton import prefill_call
from attn_ops.ops import cuda_kernels, unsupported
from attn_ops.ops.backends import MemoryLayout, Problem
from attn_ops.ops.cuda_kernels import PrefillKey
from attn_ops.plan import equal_requests, sizing
from attn_ops.plan.equal_requests import EqualRequests
from attn_ops.plan.sizing import rows_per_tile
from attn_ops.plan.state import KV_BLOCK
from attn_ops.symbolic_sizes import at_least, at_most

E4M3 = torch.float8_e4m3fn

PAGES, PAGE_SIZE, HEADS, DIM = 5, 24, 3, 128

SPILL_BYTES = 80
"""Of a thread that may be spilled: values that are needed again after a loop, once for a KV tile, or beside the
exponentials of a soft cap."""

MASK_SPILL_BYTES = 112
"""The same of images that read a custom mask. All their tiles are masked."""


def _spills(key: PrefillKey) -> tuple[int, int]:
    """Loads and stores of spilled values in the softmax of a KV tile: sums of rows, and bounds of the mask.

    Masked tiles alone load the bounds. With a custom mask all tiles are masked, and more is loaded.
    """
    if key.custom_mask:
        return (11 + (key.pos_encoding == "ALIBI"), 3)
    converters = key.fp8 or key.pos_encoding == "ROPE_LLAMA"
    has_160_registers = key[:2] == (64, 64) and (key.special == "few rows" or not converters)  # and long tiles
    if key[:2] == (128, 128) and key.dtype == E4M3:
        return (5, 0)  # the fifth is a sum
    if key[:2] == (256, 256) and key.special == "few rows":
        return (1, 0)
    if key.fp8 and (key.pos_encoding == "ROPE_LLAMA" or key.head_dim_qk == 512):
        return (2, 0)
    if key.fp8 and key.head_dim_qk == 256 and (key.padded or key.pos_encoding == "ALIBI"):
        return (3 if key.padded else 2, 0)
    return (4, 0) if has_160_registers else (0, 0)


def _finishes_early(key: PrefillKey) -> bool:
    """``kFinishEarly``: O of the tile before is finished between the exponentials of row 1."""
    return key.dtype == E4M3 or key.head_dim_vo <= 128


def _numbered(*shape: int) -> Tensor:
    """A tensor whose elements are their addresses, modulo 2^16."""
    return torch.arange(torch.Size(shape).numel()).to(torch.int16).view(shape)


def _nhd() -> Tensor:
    return _numbered(PAGES, PAGE_SIZE, HEADS, DIM)


def _hnd() -> Tensor:
    return _numbered(PAGES, HEADS, PAGE_SIZE, DIM).transpose(1, 2)


def _values_of_fused() -> Tensor:
    return _numbered(PAGES, 2, PAGE_SIZE, HEADS, DIM)[:, 1]


def _halves_of_heads() -> Tensor:
    return _numbered(PAGES, PAGE_SIZE, HEADS, 2 * DIM)[..., DIM:]


def _padded() -> Tensor:
    """Gaps after heads and pages, so that the stride of a page is no multiple of that of a head."""
    head, page = DIM + 8, PAGE_SIZE * HEADS * (DIM + 8) + 40
    return _numbered(PAGES, page).as_strided((PAGES, PAGE_SIZE, HEADS, DIM), (page, HEADS * head, head, 1), 16)


LAYOUTS = {f.__name__.strip("_"): f for f in (_nhd, _hnd, _values_of_fused, _halves_of_heads, _padded)}


def _is_valid(one: Any) -> bool:
    """What the driver asks of a map: sizes of boxes, and strides of 16 bytes, 8 elements of 16 bits."""
    within = all(0 < b <= 256 for b in one.box) and one.box[-1] * 2 == one.swizzle
    return within and len(one.shape) <= 5 and one.strides[-1] == 1 and all(s % 8 == 0 for s in one.strides[:-1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("box", [8, 24])
def test_a_map_of_pages_has_every_token(layout: str, box: int) -> None:
    t = LAYOUTS[layout]()
    one, page_step, head_step = prefill.paged_map(t, t.stride()[:3], HEADS, PAGE_SIZE, box, Columns.of(t))
    assert _is_valid(one)
    assert one.box == (1, box // 8, DIM // 64, 8, 64)
    mapped = tensor_of_map(one)
    for page in range(PAGES):
        for head in range(HEADS):
            of_head = mapped[page * page_step + head * head_step]  # groups, blocks, 8 tokens, 64 columns
            assert torch.equal(of_head.permute(0, 2, 1, 3).reshape(PAGE_SIZE, DIM), t[page, :, head])
    # Boxes after the end begin at this group of tokens.
    assert one.shape[1] == PAGE_SIZE // 8


@pytest.mark.parametrize("layout", ["NHD", "HND", "fused", "padded"])
def test_a_map_of_ragged_tokens_has_every_token(layout: str) -> None:
    tokens = 77
    t = {
        "NHD": _numbered(tokens, HEADS, DIM),
        "HND": _numbered(HEADS, tokens, DIM).transpose(0, 1),
        "fused": _numbered(tokens, HEADS, 2 * DIM)[..., DIM:],
        "padded": _numbered(tokens, HEADS + 1, DIM + 16)[:, 1:, 8 : DIM + 8],
    }[layout]
    one = prefill.ragged_map(t, (0, *t.stride()[:2]), HEADS, tokens, 64, Columns.of(t))
    assert _is_valid(one)
    assert one.box == (1, 1, 64, 64)
    assert one.shape[2] == tokens
    mapped = tensor_of_map(one)
    for head in range(HEADS):
        assert torch.equal(mapped[head].permute(1, 0, 2).reshape(tokens, DIM), t[:, head])


@pytest.mark.parametrize("group", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("padding", [0, 8])
def test_a_box_of_queries_is_64_packed_rows(group: int, padding: int) -> None:
    rows, kv_heads = 70, 2
    q = _numbered(rows, kv_heads * group, DIM + padding)[..., :DIM]
    one, box_rows = prefill.query_map(q, group), prefill.PACKED_ROWS // group
    assert _is_valid(one)
    assert one.box == (DIM // 64, box_rows, group, 64)
    mapped = tensor_of_map(one)
    for kv_head in range(kv_heads):
        first, head = 3, kv_head * group
        box = mapped[:, first : first + box_rows, head : head + group]
        packed = box.permute(1, 2, 0, 3).reshape(prefill.PACKED_ROWS, DIM)
        for p in range(prefill.PACKED_ROWS):
            assert torch.equal(packed[p], q[first + p // group, head + p % group])


@pytest.mark.parametrize("group", [3, 5, 7, 72, 128])
def test_groups_that_do_not_divide_64_have_a_map_too(group: int) -> None:
    assert _is_valid(prefill.query_map(_numbered(4, group, DIM), group))


@needs_nvrtc
@pytest.mark.parametrize(
    "key", [k for k in prefill.SPECIALIZATIONS if k.special == "few rows" or k.dtype != torch.float16], ids=str
)
def test_sizes_are_those_of_the_source(key: PrefillKey) -> None:
    """The compiler evaluates the source's constants and the size of its struct."""
    one, tile = prefill.SPECIALIZATIONS[key], prefill.TILE_OF[key]
    row_bytes = min(ROW_BYTES, key.head_dim_qk * key.dtype.itemsize)
    expected = {
        "sizeof(Shared)": one.shared_bytes,
        "kThreads": one.threads,
        "kPackedRows": prefill.PACKED_ROWS,
        "kRowBytes": row_bytes,
        "kLoadedRowBytes": min(tile.row_bytes, row_bytes),
        "kGroupBytes": row_bytes * GROUP_TOKENS,
        "kNone": prefill.NO_WINDOW,
        "kMaxGroup": cuda_kernels.CUDA_PREFILL_GROUP,
        "kLikeOperands": 0,
        **(dict(zip(("kFp8E4M3", "kFp8E5M2"), prefill.FP8_TYPES.values(), strict=True)) if tile.fp8 else {}),
        **({"kBFloat16Queries": prefill.BFLOAT16_QUERIES} if tile.fp8 else {}),
        **dict(zip(("kFloat32", "kFloat16", "kBFloat16", "kE4M3", "kE5M2"), prefill.OUT_TYPES.values(), strict=True)),
    }
    checks = "".join(f'static_assert({name} == {value}, "{name}");\n' for name, value in expected.items())
    check_syntax(one, checks)
    with pytest.raises(compile_module.CompilerError, match="static assertion failed"):
        check_syntax(one, 'static_assert(kTile == 1, "");\n')


TILES = [tile for family in prefill.FAMILIES for tile in family.tiles.values()]


def test_a_tile_is_whole_boxes_of_whole_groups() -> None:
    for tile in TILES:
        assert (tile.fp8.tokens if tile.fp8 else tile.tokens) % tile.box == 0
        assert tile.box % GROUP_TOKENS == 0


@pytest.mark.parametrize("page_size", [8, 24, 64, 96, 128, 256])
def test_a_split_begins_with_a_box_of_pages(page_size: int) -> None:
    for tile in TILES:
        box = box_of_pages(page_size, tile.box)
        assert page_size % box == tile.tokens % box == KV_BLOCK % box == box % GROUP_TOKENS == 0


def test_a_row_in_shared_memory_is_no_wider_than_a_head() -> None:
    assert [Columns.of(torch.zeros(1, dim).half()).box for dim in (32, 64, 192)] == [32, 64, 64]
    assert [Columns.of(torch.zeros(1, dim).to(E4M3)).box for dim in (64, 128, 256)] == [64, 128, 128]


@pytest.mark.parametrize("dim", [40, 72, 96, 120, 160, 192])
def test_boxes_of_padded_heads_begin_at_any_column(dim: int) -> None:
    """The dimension of columns has those of a head, so that TMA writes zeros for the others."""
    cache, ragged = _numbered(PAGES, PAGE_SIZE, HEADS, dim), _numbered(77, HEADS, dim)
    columns = Columns.of(cache, padded=True)
    paged, page_step, head_step = prefill.paged_map(cache, cache.stride()[:3], HEADS, PAGE_SIZE, 24, columns)
    of_tokens = prefill.ragged_map(ragged, (0, *ragged.stride()[:2]), HEADS, 77, 64, columns)
    queries = prefill.query_map(_numbered(70, 8, dim), 4, padded=True)
    assert (paged.box, of_tokens.box, queries.box) == ((1, 3, 1, 8, 64), (1, 1, 64, 64), (1, 16, 4, 64))
    for one in (paged, of_tokens, queries):
        assert _is_valid(one)
        assert one.shape[-1] == dim
    for head in range(HEADS):
        assert torch.equal(tensor_of_map(of_tokens)[head, 0], ragged[:, head])
        for page in range(PAGES):
            of_page = tensor_of_map(paged)[page * page_step + head * head_step]  # groups, 1, 8 tokens, columns
            assert torch.equal(of_page.reshape(PAGE_SIZE, dim), cache[page, :, head])


@pytest.fixture(scope="module")
def disassembled() -> None:
    disassemble(prefill.SPECIALIZATIONS.values())


@needs_nvrtc
@pytest.mark.usefixtures("disassembled")
@pytest.mark.parametrize("key", prefill.SPECIALIZATIONS, ids=str)
def test_registers_suffice_and_products_overlap_the_softmax(key: PrefillKey) -> None:
    """The assembler may move exponentials behind the wait for the second product, and adds waits between products."""
    one, tile = prefill.SPECIALIZATIONS[key], prefill.TILE_OF[key]
    tokens = tile.tokens
    assert usage_of(one).stack <= (MASK_SPILL_BYTES if key.custom_mask else SPILL_BYTES)
    code = disassembly(one)
    waits = re.findall(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\d)", code)
    # Last product; next unit's logits.
    beside_the_epilogue = ["1", "0"] if tile.queries > 1 and key.special != "few rows" else []
    pv = ["0"] * (4 if key[:2] == (256, 256) and key.dtype == E4M3 else 1)  # for each part of the columns
    of_parts = ["1"] * (tile.key_parts - 1)
    # First tile; mainloop; ...; last product.
    assert waits == [*of_parts, "0", *of_parts, "1", *pv, *beside_the_epilogue, *pv]
    steps = re.findall(r"DEPBAR.LE gsb0, 0x1((?:(?!DEPBAR).)*)DEPBAR.LE gsb0, 0x0(.*?)GMMA", code, re.DOTALL)
    step, rest = steps[1 if of_parts else 0]
    softmax = step.rpartition("MUFU.RCP")[2]  # after the soft cap
    exponentials = tokens / 2 * 15 / 16  # at least: of a thread, as a warpgroup has 64 packed rows and a KV tile
    if _finishes_early(key):
        assert softmax.count("MUFU.EX2") >= exponentials / 2 * 3 / 4  # of row 0: keep_before
        finishing = rest.rpartition("MUFU.EX2")[0]
        if len(pv) == 1:  # between the exponentials of row 1, few of which come before the wait, is most of O
            assert rest.count("MUFU.EX2") >= tokens / 4 * 3 / 4
            assert len(re.findall("FMUL|FFMA", finishing)) >= key[1] / 2 * 3 / 4
    else:
        wide = 16 if tile.converters else 29
        assert softmax.count("MUFU.EX2") >= min(exponentials, wide if key.head_dim_vo >= 256 else exponentials)
    loads, stores = _spills(key)
    assert len(re.findall(r"\bLDL\b", softmax)) <= loads
    assert softmax.count("STL") <= stores
    # Two numbers at once, in a loop over two or four chunks of 16: one for keys and values, or one for each of both.
    equal_rings = key.head_dim_qk == key.head_dim_vo != 512 and key.pos_encoding != "ROPE_LLAMA"
    loops = 1 if equal_rings else 2
    unpacks = range(16 * loops, 32 * loops + 1, 16) if tile.fp8 else (0,)
    for name in ("E4M3", "E5M2"):
        assert code.count(f".{name}.UNPACK") in unpacks


@needs_nvrtc
@needs_the_module
@pytest.mark.parametrize(("dim", "ctas_per_sm"), [(64, 3), (128, 2)])
def test_a_launch_for_short_kv_has_several_ctas_for_each_sm(
    dim: int, ctas_per_sm: int, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_module, "num_sms", lambda device: SMS)
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: SMS)
    tile = prefill.SHORT_KV_TILES[dim, dim]
    for tokens, rows in ((256, 10), (256, 300), (256, 5000), (513, 10)):
        q, k = (torch.zeros(n, heads, dim, dtype=torch.bfloat16) for n, heads in ((rows, 8), (tokens, 2)))
        prefill.single_prefill(q, k, k)
        if tokens > 512:
            assert fake_driver.get("threads") != tile.threads
            continue
        tile_rows = rows_per_tile(8, 2, rows)
        units = -(-rows // tile_rows) * 2 * -(-tile_rows * 4 // 64)
        assert fake_driver.array("grid", 3) == [min(units, ctas_per_sm * SMS), 1, 1]
        settings = [fake_driver.get(name) for name in ("threads", "shared", "pdl")]
        assert settings == [256, tile.shared_bytes(dim, dim, 2, False), 1]
        # The driver reserves 1 KB of the 228 KB of an SM for each CTA.
        assert ctas_per_sm * (fake_driver.get("shared") + 1024) <= 228 << 10


SMS = 132


@needs_nvrtc
@needs_the_module
def test_a_launch_has_a_cta_for_each_unit_up_to_one_for_each_sm(
    fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_module, "num_sms", lambda device: SMS)
    k = torch.zeros(300, 2, 128, dtype=torch.bfloat16)
    for rows, heads in ((5, 8), (33, 8), (1000, 8), (40, 14)):
        prefill.single_prefill(torch.zeros(rows, heads, 128, dtype=torch.bfloat16), k, k)
        group = heads // 2
        tile_rows = rows_per_tile(heads, 2, rows)
        units = -(-rows // tile_rows) * 2 * -(-tile_rows * group // 128)
        assert fake_driver.array("grid", 3) == [min(units, SMS), 1, 1]
        settings = [fake_driver.get(name) for name in ("threads", "shared", "pdl")]
        assert settings == [384, prefill.TILES[128, 128].shared_bytes(128, 128, 2, False), 1]


@needs_nvrtc
@needs_the_module
@pytest.mark.parametrize(
    ("heads", "dtype", "kv_dtype"),
    [
        (8, torch.bfloat16, torch.bfloat16),
        (14, torch.bfloat16, torch.bfloat16),
        (8, torch.bfloat16, torch.float8_e4m3fn),
        (14, torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
)
def test_a_package_takes_any_number_of_rows(
    heads: int, dtype: torch.dtype, kv_dtype: torch.dtype, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced for 100 rows, the integers of a call are those of an eager launch for any number.

    Eager calls of fewer rows than a query tile have a smaller tile.
    """
    monkeypatch.setattr(kernel_module, "num_sms", lambda device: SMS)

    def call(rows: Tensor) -> Tensor:
        q, k = rows.new_zeros(rows.shape[0], heads, 128), rows.new_zeros(300, 2, 128)
        tensors = q.to(dtype), k.to(kv_dtype), (k + 1).to(kv_dtype)
        return prefill.single_prefill(*tensors, causal=True, window_left=70)[0]

    image = packaged_image(call, (100, 70, 1000), monkeypatch)
    assert [spec.name for spec in image.tensors] == ["out", "q", "k", "v"]
    assert (image.function, len(image.maps)) == ("prefill", 3)


@needs_nvrtc
@needs_the_module
def test_a_package_splits_any_number_of_keys(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One split of 700 keys, whose results go to the output, and several of more."""

    def splits(units: Any, packed_rows: Any, visible: Any, seen_by_all: Any, ctas: int) -> Any:
        return at_least(at_most(SMS // units, seen_by_all // equal_requests.SYMBOLIC_SPLIT_KEYS), 1)

    monkeypatch.setattr(kernel_module, "num_sms", lambda device: SMS)
    monkeypatch.setattr(equal_requests, "fastest_splits", splits)
    combined: list[EqualRequests] = []
    monkeypatch.setattr(prefill_call, "combine_split_requests", lambda *args: combined.append(args[-1]))

    def call(keys: Tensor) -> Tensor:
        q, k = torch.zeros(3, 8, 128).bfloat16(), keys.new_zeros(keys.shape[0], 2, 128)
        return prefill.single_prefill(q, k, k + 1, causal=True, window_left=4000)[0]

    image = packaged_image(call, (2000, 700, 6000), monkeypatch)
    assert [spec.name for spec in image.tensors] == ["out", "partial", "q", "k", "v"]
    assert [(one.splits, one.split_keys) for one in combined[1:]] == [(3, 768), (7, 640)]


@needs_nvrtc
@needs_the_module
def test_a_package_takes_a_mask_of_any_length(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "num_sms", lambda device: SMS)

    def call(rows: Tensor) -> Tensor:
        q, k = (torch.zeros(n, 2, 128).bfloat16() for n in (40, 300))
        return prefill.single_prefill(q, k, k + 1, mask=rows.new_zeros(rows.shape[0], dtype=torch.uint8))[0]

    image = packaged_image(call, (1500, 7, 20), monkeypatch)
    assert [spec.name for spec in image.tensors] == ["out", "q", "k", "v", "mask"]


@needs_nvrtc
@needs_the_module
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(("page_size", "maps"), [(16, 3), (5, 1)])
def test_a_package_takes_pages_of_any_size(
    page_size: int, maps: int, kv_dtype: torch.dtype, fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above. Pages that are copied token by token have no tensor maps; their strides go to the kernel."""
    monkeypatch.setattr(kernel_module, "num_sms", lambda device: SMS)
    monkeypatch.setattr(prefill_call, "combine_split_tiles", lambda *args, **_: None)
    planner = attn_ops.PrefillPlanner(
        5, 1000, 40, page_size=page_size, num_qo_heads=8, num_kv_heads=2, head_dim=DIM, num_ctas=6
    )
    cache = torch.zeros(40, 2, page_size, 2, DIM).to(kv_dtype)

    def call(rows: Tensor) -> Tensor:
        q = rows.new_zeros(rows.shape[0], 8, DIM)
        return prefill.batch_prefill(q, *cache.unbind(1), list(planner.state), planner.workspace, causal=True)[0]

    image = packaged_image(call, (50, 7, 1000), monkeypatch)
    assert {"out", "q", "k", "v", "partial"} < {spec.name for spec in image.tensors}
    assert (image.function, len(image.maps)) == ("prefill", maps)


GOOD = Problem(
    op="batch_prefill",
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    num_qo_heads=8,
    num_kv_heads=2,
    head_dim_qk=128,
    head_dim_vo=128,
    page_size=16,
)


def _loads(problem: Problem) -> str:
    return "ragged" if problem.page_size == 0 else "tokens" if problem.page_size % 8 else "pages"


PADDED = {
    **dict.fromkeys(((72, 72), (80, 80), (96, 96), (96, 64), (80, 16)), (96, 96)),
    **dict.fromkeys(((104, 104), (112, 112), (128, 96), (64, 128)), (128, 128)),
    **dict.fromkeys(((136, 136), (160, 160), (192, 192), (160, 128), (128, 192)), (192, 192)),
    **dict.fromkeys(((200, 200), (256, 192), (64, 256)), (256, 256)),
}
"""Head dims -> those of the 16-bit kernel without a custom mask that pads them."""


def _expected_key(problem: Problem) -> PrefillKey:
    """For any number of rows."""
    dims, fp8 = (problem.head_dim_qk, problem.head_dim_vo), problem.kv_dtype.itemsize == 1
    of_kernel = PADDED.get(dims, dims)
    return PrefillKey(
        *((128, 128) if of_kernel == (96, 96) and (fp8 or "mask" in problem.options) else of_kernel),
        _loads(problem),
        problem.dtype,
        fp8,
        custom_mask="mask" in problem.options,
        pos_encoding=problem.pos_encoding,
        padded=dims in PADDED,
    )


TAKEN: list[dict[str, Any]] = [
    {},
    {"op": "ragged_prefill", "page_size": 0},
    {"op": "ragged_prefill", "page_size": 0, "layout": MemoryLayout(joinable=False)},
    {"op": "single_prefill", "page_size": 0, "dtype": torch.float16, "kv_dtype": torch.float16},
    *({"head_dim_qk": dims[0], "head_dim_vo": dims[1]} for dims in (*prefill.TILES, *PADDED)),
    {"op": "block_sparse_prefill", "head_dim_qk": 512, "head_dim_vo": 512, "page_size": 4, "options": ("mask",)},
    {"page_size": 8},
    {"page_size": 264},
    {"page_size": 12},
    {"page_size": 1, "layout": MemoryLayout(mappable=False, joinable=False)},
    {"op": "block_sparse_prefill", "page_size": 4},
    {"num_qo_heads": 1024, "num_kv_heads": 1},
    {"out_dtype": torch.float8_e4m3fn, "options": ("out_dtype",)},
    {"options": tuple(sorted(unsupported.CUDA_PREFILL_OPTIONS))},
    {"options": tuple(sorted(unsupported.CUDA_PREFILL_OPTIONS - {"mask"}))},
    {"options": ("mask",), "page_size": 1},
    {"options": ("mask",), "head_dim_qk": 96, "head_dim_vo": 96},
    {"op": "block_sparse_prefill", "page_size": 4, "options": ("mask",), "head_dim_qk": 160, "head_dim_vo": 160},
    *(
        {"head_dim_qk": dims[0], "head_dim_vo": dims[1], "options": ("pos_encoding",), "pos_encoding": encoding}
        for encoding, tiles in (("ROPE_LLAMA", prefill.ROPE_TILES), ("ALIBI", prefill.ALIBI_TILES))
        for dims in tiles
    ),
    {"options": ("mask", "pos_encoding"), "pos_encoding": "ROPE_LLAMA"},
    {"options": ("mask", "pos_encoding"), "pos_encoding": "ALIBI", "page_size": 1},
    {"op": "single_prefill", "page_size": 0, "options": ("causal", "pos_encoding"), "pos_encoding": "ALIBI"},
]


OF_512: dict[str, Any] = {"head_dim_qk": 512, "head_dim_vo": 512}
ROPE: dict[str, Any] = {"options": ("pos_encoding",), "pos_encoding": "ROPE_LLAMA"}
ALIBI: dict[str, Any] = {"options": ("pos_encoding",), "pos_encoding": "ALIBI"}

FP8_TAKEN: list[dict[str, Any]] = [
    {},
    {"kv_dtype": torch.float8_e5m2, "dtype": torch.float16},
    {"page_size": 1, "layout": MemoryLayout(mappable=False)},
    {"op": "ragged_prefill", "page_size": 0},
    {"options": tuple(sorted(unsupported.CUDA_PREFILL_OPTIONS | {"kv_scale"}))},
    OF_512,
    OF_512 | {"op": "ragged_prefill", "page_size": 0},
    *({"head_dim_qk": dims[0], "head_dim_vo": dims[1]} for dims in PADDED if not dims[0] % 16 and not dims[1] % 16),
    *(ROPE | {"head_dim_qk": dims[0], "head_dim_vo": dims[1], "page_size": 1} for dims in prefill.KV_FP8_ROPE_TILES),
    *(ALIBI | {"head_dim_qk": dims[0], "head_dim_vo": dims[1]} for dims in prefill.KV_FP8_ALIBI_TILES),
]


@pytest.mark.parametrize("fields", FP8_TAKEN, ids=str)
def test_fp8_calls_that_it_runs(fields: dict[str, Any], on_hopper: list[Specialization]) -> None:
    problem = replace(GOOD, **{"kv_dtype": torch.float8_e4m3fn, **fields})
    assert unsupported.cuda_prefill_fp8(problem) == []
    key = _expected_key(problem)
    keys = [key]
    if key[:2] == (512, 512):
        keys.append(key._replace(special="few rows"))
    elif not key.padded and key.pos_encoding == "NONE" and key.loads != "ragged":
        keys.append(key._replace(special="few rows", dtype=torch.float16))
    assert on_hopper == [prefill.SPECIALIZATIONS[key] for key in keys]


FP8_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": torch.device("cpu")}, "it runs on cuda, not cpu"),
    ({"kv_dtype": torch.bfloat16}, "the cache is torch.bfloat16, not FP8"),
    ({"dtype": torch.float32}, "torch.float32 is not a 16-bit dtype"),
    ({"head_dim_qk": 72, "head_dim_vo": 72}, "head dimensions 72 and 72 have no tile"),
    ({"page_size": 12, "layout": MemoryLayout(aligned=False)}, "rows are not aligned to 16 bytes"),
    ({"options": ("mask",), "context_ranks": 2}, "it does not implement mask on the keys of one rank"),
    (
        {"options": ("mask",), "head_dim_qk": 96, "head_dim_vo": 96},
        "head dimensions 96 and 96 have no tile with mask and an FP8 cache",
    ),
    (ROPE | OF_512, "head dimensions 512 and 512 have no tile with RoPE"),
    (ROPE | {"options": ("mask", "pos_encoding")}, "it does not implement mask with RoPE and an FP8 cache"),
    (ALIBI | OF_512, "head dimensions 512 and 512 have no tile with ALiBi"),
    (ALIBI | {"options": ("mask", "pos_encoding")}, "it does not implement mask with ALiBi and an FP8 cache"),
]


@pytest.mark.parametrize(("fields", "reason"), FP8_REFUSED, ids=[reason for _, reason in FP8_REFUSED])
def test_reasons_of_fp8_one_by_one(fields: dict[str, Any], reason: str, on_hopper: list[Specialization]) -> None:
    problem = replace(GOOD, **{"kv_dtype": torch.float8_e4m3fn, **fields})
    assert unsupported.cuda_prefill_fp8(problem) == [reason]
    assert not on_hopper


OF_E4M3: dict[str, Any] = {"dtype": E4M3, "kv_dtype": E4M3}

E4M3_TAKEN: list[dict[str, Any]] = [
    *({"head_dim_qk": dims[0], "head_dim_vo": dims[1]} for dims in prefill.FP8_TILES),
    {"page_size": 20},
    {"op": "ragged_prefill", "page_size": 0},
    {"options": tuple(sorted(unsupported.CUDA_PREFILL_OPTIONS - {"mask"} | {"kv_scale"}))},
]


@pytest.mark.parametrize("fields", E4M3_TAKEN, ids=str)
def test_calls_with_fp8_queries_that_it_runs(fields: dict[str, Any], on_hopper: list[Specialization]) -> None:
    problem = replace(GOOD, **OF_E4M3 | fields)
    assert unsupported.cuda_prefill_e4m3(problem) == []
    dims = problem.head_dim_qk, problem.head_dim_vo
    assert on_hopper == [prefill.SPECIALIZATIONS[PrefillKey(*dims, _loads(problem), problem.dtype, True)]]


E4M3_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.bfloat16}, "the query is torch.bfloat16, not torch.float8_e4m3fn"),
    ({"kv_dtype": torch.float8_e5m2}, "the cache is torch.float8_e5m2, not torch.float8_e4m3fn"),
    ({"head_dim_qk": 192}, "head dimensions 192 and 128 have no tile"),
    ({"layout": MemoryLayout(mappable=False)}, unsupported.UNMAPPABLE),
    ({"layout": MemoryLayout(joinable=False)}, unsupported.UNJOINABLE),
    ({"options": ("mask",)}, "it does not implement mask"),
]


@pytest.mark.parametrize(("fields", "reason"), E4M3_REFUSED, ids=[reason for _, reason in E4M3_REFUSED])
def test_reasons_of_fp8_queries(fields: dict[str, Any], reason: str, on_hopper: list[Specialization]) -> None:
    assert unsupported.cuda_prefill_e4m3(replace(GOOD, **OF_E4M3 | fields)) == [reason]
    assert not on_hopper


@pytest.mark.parametrize("fields", TAKEN, ids=str)
def test_calls_that_it_runs(fields: dict[str, Any], on_hopper: list[Specialization]) -> None:
    problem = replace(GOOD, **fields)
    assert unsupported.cuda_prefill(problem) == []
    key = _expected_key(problem)
    plain = not (key.custom_mask or key.padded) and key.pos_encoding == "NONE"
    special = ["", *["few rows"] * (key[:2] == (512, 512))]
    if plain:
        special += ["large batch"] * (key[:2] == (128, 128)) + ["short KV"] * (key[:2] in prefill.SHORT_KV_TILES)
    keys = [key._replace(special=one) for one in special]
    of_prefill = [one for one in on_hopper if one.kernel.function == "prefill"]  # one row is for decode
    assert of_prefill == [prefill.SPECIALIZATIONS[key] for key in keys]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": torch.device("cpu")}, "it runs on cuda, not cpu"),
    ({"kv_dtype": torch.float8_e4m3fn}, "the cache is torch.float8_e4m3fn"),
    ({"dtype": torch.float32, "kv_dtype": torch.float32}, "torch.float32 is not a 16-bit dtype"),
    ({"head_dim_qk": 48, "head_dim_vo": 48}, "head dimensions 48 and 48 have no tile"),
    ({"head_dim_qk": 100, "head_dim_vo": 100}, "head dimensions 100 and 100 have no tile"),
    ({"head_dim_qk": 512, "head_dim_vo": 256}, "head dimensions 512 and 256 have no tile"),
    (ROPE | {"head_dim_qk": 96, "head_dim_vo": 96}, "head dimensions 96 and 96 have no tile with RoPE"),
    (ROPE | OF_512, "head dimensions 512 and 512 have no tile with RoPE"),
    (ALIBI | OF_512, "head dimensions 512 and 512 have no tile with ALiBi"),
    (ROPE | {"head_dim_qk": 192}, "head dimensions 192 and 128 have no tile with RoPE"),
    (ROPE | {"context_ranks": 2}, "it does not implement pos_encoding on the keys of one rank"),
    (ALIBI | {"head_dim_qk": 192}, "head dimensions 192 and 128 have no tile with ALiBi"),
    (ALIBI | {"context_ranks": 2}, "it does not implement pos_encoding on the keys of one rank"),
    ({"page_size": 12, "layout": MemoryLayout(aligned=False)}, "rows are not aligned to 16 bytes"),
    ({"num_qo_heads": 32769, "num_kv_heads": 1}, "it needs at most 32768 query heads per KV head"),
    ({"layout": MemoryLayout(aligned=False)}, "rows are not aligned to 16 bytes"),
    ({"layout": MemoryLayout(mappable=False)}, unsupported.UNMAPPABLE),
    ({"layout": MemoryLayout(joinable=False)}, unsupported.UNJOINABLE),
    ({"options": ("mask",), "context_ranks": 2}, "it does not implement mask on the keys of one rank"),
    ({"options": ("kv_scale",)}, "it does not implement kv_scale"),
    ({"options": ("causal",), "context_ranks": 2}, "it does not implement causal on the keys of one rank"),
    ({"options": ("window_left",), "context_ranks": 2}, "it does not implement window_left on the keys of one rank"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_reasons_one_by_one(fields: dict[str, Any], reason: str, on_hopper: list[Specialization]) -> None:
    assert unsupported.cuda_prefill(replace(GOOD, **fields)) == [reason]
    assert not on_hopper  # nothing is compiled for a call that another kernel runs


def test_without_triton_nothing_combines(monkeypatch: pytest.MonkeyPatch, on_hopper: list[Specialization]) -> None:
    monkeypatch.setattr(unsupported, "triton_installed", lambda: False)
    (reason,) = unsupported.cuda_prefill(GOOD)
    assert reason == "triton, whose kernel combines its partial results, is not installed"
    assert not on_hopper


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), None])
def test_other_gpus_are_refused(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch, on_hopper: list[Specialization]
) -> None:
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: capability)
    assert unsupported.cuda_prefill(GOOD) == [f"it needs compute capability 9.0, not {capability}"]
    assert not on_hopper
