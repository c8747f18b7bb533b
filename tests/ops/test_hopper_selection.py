"""Which calls the Hopper kernels run: the problem that a call's check makes of it, and their reasons."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from helpers.cases import Case
from helpers.harness import OPS, Setup
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attn_ops
from attn_ops.errors import BackendError
from attn_ops.ops import backends, unsupported
from attn_ops.ops.checks import CHECKS

pytestmark = pytest.mark.usefixtures("on_hopper")

BASE: dict[str, Any] = {"dtype": torch.bfloat16, "heads": (8, 2), "head_dims": (128, 128), "causal": True}
DECODE = "cuda.decode"
GENERAL, PREFILL, FP8_PREFILL = "triton", "cuda.prefill", "cuda.prefill_fp8"
MLA = "cuda.mla"
E4M3_PREFILL = "cuda.prefill_e4m3"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _on_cuda(arguments: dict[str, Any]) -> dict[str, Any]:
    """Fake tensors of the same sizes and strides on a GPU."""
    with FakeTensorMode():
        return torch.utils._pytree.tree_map_only(
            Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"), arguments
        )


def _prefill(kind: str = "prefill", **options: Any) -> tuple[str, dict[str, Any]]:
    setup = Setup(kind, Case("case", **{"kv_lens": (300, 100), "qo_lens": (100, 100), **BASE, **options}))
    return OPS[kind], _on_cuda(setup.arguments)


def _mla(
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (512, 64),
    page_size: int = 64,
    kv_dtype: torch.dtype | None = None,
    shift: int = 0,
    pages: int = 10,
    tile_rows: int | None = None,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    sizes = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": sum(dims), "head_dim_vo": dims[0]}
    planner = attn_ops.PrefillPlanner(5, 9, 40, page_size=page_size, tile_rows=tile_rows, **sizes)
    q_nope, q_pe = torch.zeros(9, 16, sum(dims) + shift, dtype=dtype)[..., shift:].split(dims, -1)
    ckv, kpe = torch.zeros(pages, page_size, sum(dims), dtype=kv_dtype or dtype).split(dims, -1)
    tensors = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe, "plan": planner.state}
    return "batch_mla", _on_cuda(tensors | {"workspace": planner.workspace, "sm_scale": 0.1, **options})


def _chosen(op: str, arguments: dict[str, Any], **kwargs: Any) -> str:
    return backends.choose(CHECKS[op](**arguments), **kwargs).label(op)


def _lines(op: str, arguments: dict[str, Any]) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in attn_ops.explain(op, **arguments).splitlines())


@pytest.mark.parametrize(
    "call",
    [
        _prefill(),
        _prefill("ragged", causal=False),
        _prefill(window_left=50, dtype=torch.float16, logits_soft_cap=5.0, sinks=1.0),
        _prefill(head_dims=(64, 64)),
        _prefill("ragged", head_dims=(192, 128)),
        _prefill(head_dims=(256, 256), page_size=48, kv_layout="HND"),
        _prefill(page_size=8, heads=(7, 1)),
        _prefill(window_left=20, window_right=5, causal=False),
        _prefill(storage="fused"),
        _prefill(masked=0.5),
        _prefill(pos_encoding="ALIBI"),
        _prefill(head_dims=(96, 96)),
        _prefill("ragged", head_dims=(80, 192)),
        _prefill("ragged", pos_encoding="ALIBI", masked=0.5, head_dims=(64, 64)),
        _mla(),
        _mla(page_size=192, dtype=torch.float16, causal=True),
        _mla(kv_dtype=E4M3, kv_scale=torch.ones(2)),
        _mla(kv_dtype=E5M2, tile_rows=1),
    ],
    ids=range(18),
)
def test_the_hopper_kernel_runs_and_explain_names_it(call: tuple[str, dict[str, Any]]) -> None:
    kernel = MLA if call[0] == "batch_mla" else PREFILL
    assert _chosen(*call) == kernel
    assert _chosen(*call, lowerable=True) == GENERAL
    assert _chosen(*call, lowerable=True, images=True) == kernel
    lines = _lines(*call)
    of_fp8 = [] if kernel == MLA else [E4M3_PREFILL, FP8_PREFILL]
    assert list(lines) == [kernel, *of_fp8, GENERAL, "cpu.sdpa", "reference"]
    assert lines[kernel] == f"runs it, kernel {kernel.partition('.')[2]}; packages launch its image"
    assert lines[GENERAL] == "can run it, kernel prefill"
    assert lines["reference"] == "can run it"


@pytest.mark.parametrize(
    ("call", "kernel"),
    [
        (_prefill(page_size=1), PREFILL),
        (_prefill(page_size=12, head_dims=(64, 64)), PREFILL),
        (_prefill(page_size=12, kv_dtype=E4M3), FP8_PREFILL),
        (_prefill(page_size=5, dtype=E4M3, kv_dtype=E4M3), E4M3_PREFILL),
        (_mla(page_size=1), MLA),
        (_mla(page_size=32, kv_dtype=E4M3), MLA),
    ],
    ids=range(6),
)
def test_pages_have_any_size(call: tuple[str, dict[str, Any]], kernel: str) -> None:
    assert _chosen(*call) == _chosen(*call, lowerable=True, images=True) == kernel
    assert _lines(*call)[kernel].startswith("runs it")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_prefill(dtype=torch.float32), "not a 16-bit dtype"),
        (_prefill(head_dims=(48, 48)), "head dimensions 48 and 48"),
        (_prefill(head_dims=(96, 96), pos_encoding="ALIBI"), "no tile with ALiBi"),
        (_prefill(pos_encoding="ALIBI", head_dims=(96, 96)), "no tile with ALiBi"),
        (_prefill(kv_scale=(1.0, 2.0)), "does not implement kv_scale"),
        (_prefill("ragged", kv_lens=(0, 0)), "keys and values have no elements"),
        (_mla(dtype=torch.float32), "not a 16-bit dtype"),
        (_mla(dims=(256, 64)), "not 512 + 64"),
        (_mla(shift=1), "not aligned to 16 bytes"),
        (_mla(window_left=100), "does not implement window_left"),
        (_mla(logits_soft_cap=1.0), "does not implement logits_soft_cap"),
        (_mla(sinks=torch.zeros(16)), "does not implement sinks"),
        (_mla(kv_scale=torch.ones(2)), "does not implement kv_scale"),
        (_mla(pages=0), "keys and values have no elements"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_calls_run_the_general_kernel(call: tuple[str, dict[str, Any]], reason: str) -> None:
    op, arguments = call
    assert _chosen(*call) == GENERAL
    lines = _lines(op, arguments)
    kernel = MLA if op == "batch_mla" else PREFILL
    assert next(iter(lines)) == kernel
    assert reason in lines[kernel]
    entry = next(backend for backend in backends.BACKENDS if backend.has(op) and backend.label(op) == kernel)
    assert len(entry.unsupported_reasons(CHECKS[op](**arguments))) == 1
    assert lines[GENERAL] == "runs it, kernel prefill"


def _single(rows: int, **options: Any) -> tuple[str, dict[str, Any]]:
    arguments = _prefill("ragged", qo_lens=(rows,), kv_lens=(300,), **options)[1]
    return "single_prefill", {name: t for name, t in arguments.items() if name not in ("plan", "workspace")}


def _block_sparse(row_block: int) -> tuple[str, dict[str, Any]]:
    planner = attn_ops.BlockSparsePlanner(128, 256, row_block, 16, 9, num_qo_heads=8, num_kv_heads=2, head_dim=128)
    q = torch.zeros(128, 8, 128, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 256, 2, 128).to(E4M3).unbind()
    tensors = {"q": q, "k": k, "v": v, "plan": planner.state, "workspace": planner.workspace}
    return "block_sparse_prefill", _on_cuda(tensors)


FIXED_SPLIT = {"fixed_split_size": 16}


@pytest.mark.parametrize(
    "call",
    [
        _prefill(kv_dtype=E4M3),
        _prefill("ragged", kv_dtype=E4M3, kv_scale=(1.0, 2.0), dtype=torch.float16),
        _prefill(kv_dtype=E4M3, window_left=50, logits_soft_cap=5.0, sinks=1.0, out_dtype=E5M2),
        _prefill("ragged", kv_dtype=E4M3, head_dims=(192, 128)),
        _prefill(dtype=E4M3, head_dims=(192, 128)),  # of which there are no products in FP8
        _prefill(kv_dtype=E4M3, planner={"tile_rows": 17}),
        _prefill(kv_dtype=E4M3, heads=(130, 2), planner={"tile_rows": 1}),
        _prefill(kv_dtype=E4M3, qo_lens=(1, 1), planner=FIXED_SPLIT),  # its tiles depend on no number of rows
        _single(1, kv_dtype=E4M3),
        _block_sparse(64),
        _prefill(kv_dtype=E4M3, planner={"tile_rows": 16}),
        _prefill(dtype=E4M3, head_dims=(192, 128), qo_lens=(1, 1)),
        _block_sparse(16),
        _prefill(kv_dtype=E5M2),
        _single(100, kv_dtype=E5M2, dtype=torch.float16),
        _prefill(kv_dtype=E5M2, planner={"tile_rows": 1}),
    ],
    ids=range(16),
)
def test_an_fp8_cache_is_converted(call: tuple[str, dict[str, Any]], on_hopper: list[Any]) -> None:
    for place in ({}, {"traced": True}, {"lowerable": True, "images": True}):
        assert _chosen(*call, **place) == _chosen(*call, **place, name="cuda") == FP8_PREFILL
    assert len(set(on_hopper)) in (1, 2)  # for any rows, and for few
    assert _chosen(*call, lowerable=True) == GENERAL
    lines = _lines(*call)
    assert list(lines)[:4] == [PREFILL, E4M3_PREFILL, FP8_PREFILL, GENERAL]
    assert lines[FP8_PREFILL] == "runs it, kernel prefill_fp8; packages launch its image"
    assert lines[GENERAL] == "can run it, kernel prefill"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_prefill(dtype=torch.float32, kv_dtype=E4M3), "torch.float32 is not a 16-bit dtype"),
        (_prefill(dtype=torch.float32, kv_dtype=E5M2), "torch.float32 is not a 16-bit dtype"),
        (_prefill(qo_lens=(1, 1)), "the cache is torch.bfloat16, not FP8"),
    ],
    ids=range(3),
)
def test_calls_that_no_kernel_for_fp8_caches_runs(call: tuple[str, dict[str, Any]], reason: str) -> None:
    assert _lines(*call)[FP8_PREFILL] == reason


@pytest.mark.parametrize(
    ("options", "decodes"),
    [
        ({}, True),
        ({"kv_dtype": E4M3, "head_dims": (96, 96)}, True),
        ({"pos_encoding": "ROPE_LLAMA"}, True),
        ({"pos_encoding": "ROPE_LLAMA", "kv_dtype": E4M3}, False),
        ({"pos_encoding": "ALIBI"}, False),
        ({"heads": (34, 2)}, False),
        ({"head_dims": (256, 256)}, False),
    ],
    ids=str,
)
def test_a_dense_call_needs_the_decode_kernel_of_its_sizes(
    options: dict[str, Any], decodes: bool, on_hopper: list[Any]
) -> None:
    """Which a call of one row runs: it is compiled, or found not to compile, before the call is checked."""
    call = _single(1, **options)
    assert _chosen(*call) == (FP8_PREFILL if "kv_dtype" in options else PREFILL)
    assert {one.kernel.function for one in on_hopper} == ({"prefill", "decode"} if decodes else {"prefill"})
    assert all(("DENSE", 1) in one.macros for one in on_hopper if one.kernel.function == "decode")


def test_an_exported_program_has_any_number_of_rows(caplog: pytest.LogCaptureFixture) -> None:
    """What runs does not depend on the number of rows, which needs no guard."""

    class Attend(torch.nn.Module):
        def __init__(self, op: str) -> None:
            super().__init__()
            self.op = getattr(torch.ops.attn, op)

        def forward(self, *tensors: Any) -> Any:
            return self.op(*tensors)

    rows = torch.export.Dim("rows", min=1, max=4000)
    some = (
        _single(50, kv_dtype=E4M3),
        _prefill("ragged", kv_dtype=E4M3),
        _prefill("ragged", kv_dtype=E4M3, qo_lens=(16, 16)),
    )
    for op, arguments in some:
        inputs = tuple(arguments[name] for name in ("q", "k", "v", "plan", "workspace") if name in arguments)
        fixed = tuple(type(t)(*({} for _ in t)) if isinstance(t, tuple) else {} for t in inputs[1:])
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "attn_ops.ops.register"):
            program = torch.export.export(Attend(op), inputs, dynamic_shapes=(({0: rows}, *fixed),))
        messages = {record.getMessage() for record in caplog.records if record.name == "attn_ops.ops.register"}
        assert messages == {f"{op}: {FP8_PREFILL} runs the traced call"}
        (found,) = program.range_constraints.values()
        assert (int(found.lower), int(found.upper)) == (1, 4000)


@pytest.mark.parametrize("kind", ["prefill", "ragged"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_scale": (1.0, 2.0), "head_dims": (64, 64), "out_dtype": torch.bfloat16},
        {"window_left": 50, "logits_soft_cap": 5.0, "sinks": 1.0, "head_dims": (256, 256)},
    ],
    ids=str,
)
def test_fp8_queries_are_multiplied_in_fp8(kind: str, options: dict[str, Any]) -> None:
    call = _prefill(kind, dtype=E4M3, **options)
    assert _chosen(*call) == _chosen(*call, name="cuda") == E4M3_PREFILL
    assert _chosen(*call, lowerable=True, images=True) == E4M3_PREFILL
    assert _chosen(*call, lowerable=True) == GENERAL
    assert _lines(*call)[GENERAL] == "can run it, kernel prefill"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head_dims": (192, 128)}, "head dimensions 192 and 128"),
        ({"masked": 0.5}, "does not implement mask"),
        ({"pos_encoding": "ALIBI"}, "does not implement pos_encoding"),
        ({"head_dims": (96, 96)}, "head dimensions 96 and 96"),
        ({"pos_encoding": "ALIBI", "masked": 0.5}, "does not implement"),
    ],
    ids=str,
)
def test_other_fp8_queries_are_converted(options: dict[str, Any], reason: str) -> None:
    """The kernel that converts keys and values gets them in float16, and so does the general kernel."""
    call = _prefill(dtype=E4M3, **options)
    assert _chosen(*call) == (GENERAL if {"pos_encoding", "masked"} <= options.keys() else FP8_PREFILL)
    assert reason in _lines(*call)[E4M3_PREFILL]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.float16, "head_dims": (64, 64), "heads": (16, 1), "page_size": 48},
        {"window_left": 50, "logits_soft_cap": 5.0, "sinks": 1.0, "sm_scale": 0.1, "out_dtype": torch.float8_e5m2},
        {"kv_scale": (1.0, 2.0), "kv_layout": "HND"},
        {"kv_dtype": E4M3, "kv_scale": (1.0, 2.0)},
        {"kv_dtype": E5M2, "dtype": torch.float16},
        {"head_dims": (96, 96)},
        {"head_dims": (80, 80), "kv_dtype": E4M3},
    ],
    ids=str,
)
def test_decode_runs_the_cuda_kernel_or_its_image(options: dict[str, Any]) -> None:
    setup = Setup("decode", Case("case", **{**BASE, "kv_lens": (300, 100), "page_size": 16, **options}))
    call = OPS["decode"], _on_cuda(setup.arguments)
    assert _chosen(*call) == _chosen(*call, lowerable=True, images=True) == DECODE
    assert _chosen(*call, lowerable=True) == GENERAL
    lines = _lines(*call)
    assert list(lines) == [DECODE, GENERAL, "cpu.sdpa", "reference"]
    assert lines[DECODE] == "runs it, kernel decode; packages launch its image"


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"page_size": 1},
        {"page_size": 8},
        {"head_dims": (256, 256)},
        {"head_dims": (96, 96), "pos_encoding": "ROPE_LLAMA"},
        {"heads": (17, 1)},
        {"pos_encoding": "ALIBI"},
    ],
    ids=str,
)
def test_decode_runs_the_general_kernel_otherwise(options: dict[str, Any]) -> None:
    setup = Setup("decode", Case("case", **{**BASE, "kv_lens": (300, 100), "page_size": 16, **options}))
    call = OPS["decode"], _on_cuda(setup.arguments)
    assert _chosen(*call) == _chosen(*call, lowerable=True, images=True) == GENERAL
    with pytest.raises(BackendError, match=r"cuda\.decode: "):
        _chosen(*call, name="cuda")


def test_several_keys_at_one_address_have_no_tensor_map() -> None:
    op, arguments = _mla()
    ckv = arguments["ckv_cache"]
    with FakeTensorMode():
        spread = torch.empty(1, *ckv.shape[1:], dtype=ckv.dtype, device="cuda").expand(ckv.shape)
    assert _chosen(op, arguments | {"ckv_cache": spread}) == GENERAL


def _spread(call: tuple[str, dict[str, Any]], name: str, **strides: int) -> tuple[str, dict[str, Any]]:
    """The call with other strides of a tensor of NHD: ``page``, ``token`` and ``head``, in elements."""
    op, arguments = call
    t = arguments[name]
    dims = ("page", "token", "head")[: t.dim() - 1] if op != "ragged_prefill" else ("token", "head")
    with FakeTensorMode():
        far = [strides.get(dim, stride) for dim, stride in zip(dims, t.stride(), strict=False)]
        return op, arguments | {name: torch.empty_strided(t.shape, (*far, 1), dtype=t.dtype, device="cuda")}


TOO_FAR = "strides too large for a tensor map"
TOO_MANY = "too many elements for pages and heads in one coordinate"
PAGES = _prefill()[1]["k_cache"].shape[0]
BELOW = (1 << 34) // (PAGES - 1) // 8 * 8 - 4096  # strides of PAGES pages that have fewer than 2^34 elements


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (_spread(_mla(), "ckv_cache", page=1 << 27, token=1 << 21), ""),
        (_spread(_mla(), "kpe_cache", page=1 << 27, token=1 << 21), ""),
        (_spread(_mla(), "ckv_cache", page=1 << 32), ""),  # 9 * 2^32 elements
        (_spread(_mla(), "kpe_cache", page=(1 << 39) - 8), ""),
        (_spread(_mla(), "ckv_cache", page=1 << 39), TOO_FAR),
        (_spread(_mla(pages=1), "kpe_cache", page=1 << 39), TOO_FAR),
        (_spread(_prefill(), "k_cache", page=BELOW), ""),
        (_spread(_prefill(), "k_cache", page=BELOW + 8192), TOO_MANY),
        (_spread(_prefill(), "v_cache", head=1 << 34), TOO_MANY),
        (_spread(_prefill("ragged"), "k", token=1 << 30), ""),  # heads have a coordinate of their own
        (_spread(_prefill("ragged"), "v", token=1 << 39), TOO_FAR),
    ],
    ids=range(11),
)
def test_keys_and_values_far_apart(call: tuple[str, dict[str, Any]], reason: str) -> None:
    kernel = MLA if call[0] == "batch_mla" else PREFILL
    assert _chosen(*call) == (GENERAL if reason else kernel)
    assert reason in _lines(*call)[kernel]


@pytest.mark.parametrize(("elements", "kernel"), [(8, PREFILL), (4, GENERAL)])
def test_strides_are_multiples_of_16_bytes(elements: int, kernel: str) -> None:
    """Heads of 128 bfloat16 elements, with 8 or 4 more between them."""
    op, arguments = _prefill()
    shape, stride = arguments["q"].shape, 128 + elements
    with FakeTensorMode():
        q = torch.empty_strided(shape, (shape[1] * stride, stride, 1), dtype=torch.bfloat16, device="cuda")
    assert _chosen(op, arguments | {"q": q}) == kernel


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_run_the_general_kernel(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: capability)
    assert _chosen(*_prefill()) == GENERAL
    assert f"it needs compute capability 9.0, not {capability}" in _lines(*_prefill())[PREFILL]


def test_a_backend_that_is_asked_for_is_explained() -> None:
    op, arguments = _prefill()
    lines = dict(line.split(": ", 1) for line in attn_ops.explain(op, **arguments, backend="reference").splitlines())
    assert lines["reference"] == "runs it"
    assert lines[PREFILL] == "backend=reference is asked for"


def test_without_a_compiler_the_general_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupported, "kernel_unavailable", lambda *args: "neither nvrtc nor nvcc is found")
    assert (_chosen(*_prefill()), _chosen(*_mla())) == (GENERAL, GENERAL)
    assert _lines(*_mla())[MLA] == "neither nvrtc nor nvcc is found"
