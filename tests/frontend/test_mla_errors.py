"""Wrong calls of the MLA wrapper raise typed errors."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.error_cases import Case, check_raises, empty
from helpers.wrapper_requests import Requests, workspace

import attn_ops as flashinfer
from attn_ops import errors

P = Requests((70, 3, 9, 130), (1, 5, 0, 40))
HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
DTYPES = BF16, BF16, E4M3, E4M3
LATENTS = {"q_data_type": BF16, "kv_data_type": E4M3}


def latent_of(dtypes: tuple[torch.dtype, ...], **planned: torch.dtype) -> None:
    """Of queries and caches of ``dtypes``."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(P.qo_indptr, *P.table[:2], P.seq_lens, 4, 512, 64, 16, **planned)
    sizes = (46, 4, 512), (46, 4, 64), (17, 16, 512), (17, 16, 64)
    tensors = (empty(*size).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True))
    wrapper.run(*tensors, ckv_scale=1.0, kpe_scale=1.0)


CASES: dict[str, Case] = {
    "dtype of an MLA cache that nothing computes with": (
        lambda: latent_of(DTYPES, kv_data_type=torch.int8),
        errors.DTypeError,
        "BatchMLAPagedAttentionWrapper.plan: kv_data_type is int8; expected float16, bfloat16, float32",
    ),
    "MLA without a scale": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr, *P.table[:2], P.seq_lens, 4, 48, 16, 16
        ),
        errors.OptionError,
        "sm_scale is missing for head dimensions 48 + 16",
    ),
    "MLA of latents without columns": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr, *P.table[:2], P.seq_lens, 4, 0, 64, 16
        ),
        errors.OptionError,
        "head_dim_ckv is 0; expected at least 1",
    ),
    "MLA query of one part": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).run(
            query=[empty(46, 4, 512)], kv_cache=empty(17, 16, 576)
        ),
        errors.ShapeError,
        "the query has 1 parts; expected 2, q_nope and q_pe",
    ),
    **{
        f"dtype of {name}": (
            functools.partial(latent_of, tuple(HALF if i == j else d for j, d in enumerate((BF16,) * 4))),
            errors.DTypeError,
            message,
        )
        for i, (name, message) in enumerate(
            {
                "q_nope": "q_pe is bfloat16; expected float16",
                "q_pe": "q_pe is float16; expected bfloat16",
                "ckv_cache": "ckv_cache is float16 and kpe_cache bfloat16; expected one dtype",
                "kpe_cache": "ckv_cache is bfloat16 and kpe_cache float16; expected one dtype",
            }.items()
        )
    },
    **{
        f"planned dtype of {name}": (
            functools.partial(latent_of, tuple(HALF if i == j else d for j, d in enumerate(DTYPES)), **LATENTS),
            errors.DTypeError,
            f"{name} dtype is float16; expected {str(DTYPES[i]).removeprefix('torch.')} as planned",
        )
        for i, name in enumerate(("q_nope", "q_pe", "ckv_cache", "kpe_cache"))
    },
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_call_raises(name: str) -> None:
    check_raises(CASES[name])
