"""FlashInfer's arguments of context parallelism: accepted where a call on one rank's keys means the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.page_tables import int32
from torch import Tensor

from attn_ops.errors import UnsupportedError
from attn_ops.frontend.deepseek import trtllm_batch_decode_with_kv_cache_mla
from attn_ops.frontend.trtllm import trtllm_batch_decode_with_kv_cache

TABLES = {"block_tables": int32([[2, 0], [1, 3]]), "seq_lens": int32([20, 16])}
SHARD: dict[str, Any] = {"cp_world": 2, "cp_rank": 1, "causal_seqlens_kv_global": int32([40, 30])}


def _decode(rows: int = 1, **changes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2 * rows, 4, 32, generator=generator)
    cache = torch.randn(4, 2, 2, 16, 32, generator=generator)
    sizes = {"max_seq_len": 32, "q_len_per_req": rows, "return_lse": True}
    return list(trtllm_batch_decode_with_kv_cache(q, cache, torch.zeros(0), **TABLES, **sizes, **changes))


def _mla(rows: int = 1, **changes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, cache = (torch.randn(*shape, generator=generator) for shape in ((2, rows, 4, 40), (4, 16, 40)))
    sizes = {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "max_seq_len": 32, "return_lse": True}
    return list(trtllm_batch_decode_with_kv_cache_mla(q, cache, torch.zeros(0), **TABLES, **sizes, **changes))


@pytest.mark.parametrize(("call", "shard"), [(_decode, SHARD), (_mla, {**SHARD, "enable_dcp": True})])
def test_one_row_of_a_rank(call: Any, shard: dict[str, Any]) -> None:
    for ours, plain in zip(call(**shard), call(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (_decode, {**SHARD, "rows": 2}),
        (_decode, {**SHARD, "window_left": 5}),
        (_decode, {**SHARD, "sinks": torch.zeros(4)}),
        (_decode, {**SHARD, "cp_rank": 2}),
        (_decode, {"causal_seqlens_kv_global": int32([40, 30])}),
        (_mla, {**SHARD, "enable_dcp": True, "rows": 2}),
        (_mla, {**SHARD, "enable_dcp": False}),
        (_mla, {"enable_dcp": True}),
    ],
)
def test_what_needs_the_positions_of_keys(call: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"plan with context, and merge with attn_ops\.distributed"):
        call(**arguments)
