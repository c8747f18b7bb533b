"""FP8 queries of the prefill ops on kernels that get them in float16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.cases import Case
from helpers.harness import OPS, Setup

from attn_ops import errors
from attn_ops.ops.fp8_queries import FP8_QUERY_OPS
from attn_ops.ops.options import OP_OPTIONS
from attn_ops.ops.schemas import SCHEMAS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GENERAL = "triton" if DEVICE == "cuda" else "reference"


def _setup(kind: str, **fields: Any) -> Setup:
    sizes: dict[str, Any] = {"kv_lens": (70, 0, 150, 2), "qo_lens": (40, 0, 33, 2), "heads": (4, 2), "dtype": E4M3}
    return Setup(kind, Case("case", **sizes | fields), DEVICE)


@pytest.mark.parametrize("fields", [{}, {"out_dtype": torch.bfloat16, "kv_scale": (0.5, 3.0)}], ids=str)
@pytest.mark.parametrize("backend", ["triton" if DEVICE == "cuda" else "cpu", "reference"])
@pytest.mark.parametrize("kind", ["prefill", "ragged"])
def test_the_result_is_that_of_the_converted_query(kind: str, backend: str, fields: dict[str, Any]) -> None:
    setup = _setup(kind, causal=True, **fields)
    out, lse = setup.run(backend)
    options = {"q": setup.q.half(), "out_dtype": fields.get("out_dtype", E4M3)}
    expected, expected_lse = setup.run(backend, **options)
    assert out.dtype == expected.dtype == options["out_dtype"]
    assert torch.equal(out.float(), expected.float())
    assert torch.equal(lse, expected_lse)
    assert torch.equal(setup.run(backend)[0].float(), out.float())  # a repetition


def test_a_custom_mask_is_taken() -> None:
    _setup("prefill", masked=0.5, out_dtype=torch.float32).check_run("reference")


def test_ops_with_such_queries_are_those_of_prefill() -> None:
    assert set(FP8_QUERY_OPS) <= SCHEMAS.keys()
    assert set(OPS.values()) & FP8_QUERY_OPS == {"batch_prefill", "ragged_prefill"}
    assert all("out_dtype" in OP_OPTIONS[op] for op in FP8_QUERY_OPS)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(E5M2, E5M2), (E4M3, E5M2), (E4M3, torch.bfloat16)], ids=str)
def test_other_fp8_queries_are_refused(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(n, 2, 64, device=DEVICE).to(t) for n, t in ((5, dtype), (9, kv_dtype), (9, kv_dtype)))
    message = "q is float8_e5m2" if dtype == E5M2 else f"k is {str(kv_dtype).removeprefix('torch.')} and q"
    with pytest.raises(errors.DTypeError, match=message):
        torch.ops.attn.single_prefill(q, k, v)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_has_the_result_of_eager_calls(backend: str) -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(n, h, 64, device=DEVICE).to(E4M3) for n, h in ((20, 4), (90, 2), (90, 2)))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.attn.single_prefill(q, k, v, causal=True, return_lse=True, out_dtype=torch.float32)

    out, lse = torch.compile(attend, fullgraph=True, backend=backend)(q, k, v)
    expected, expected_lse = attend(q, k, v)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)
