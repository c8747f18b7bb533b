"""The surfaces of the block-sparse wrappers."""

from __future__ import annotations

from typing import Any

import torch

import attn_ops as flashinfer
from helpers.surfaces.base import BF16, HALF, LSE, ROPE, Raises, Surface
from helpers.wrapper_requests import DEVICE, workspace

ROWS, KEYS = 20, 24
_generator = torch.Generator().manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator).to(DEVICE, torch.float16)


def _int(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


Q, K, V = _random(ROWS, 4, 64), _random(KEYS, 2, 64), _random(KEYS, 2, 64)
INDICES = _int(0, 2, 1, 2, 0, 1, 2)
PLAN = {
    "indptr": _int(0, 2, 4, 7),
    "indices": INDICES,
    **{"M": ROWS, "N": KEYS, "R": 8, "C": 8, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    "pos_encoding_mode": "ROPE_LLAMA",
}
OPTIONS: dict[str, Any] = {
    **ROPE,
    **dict.fromkeys(("q_data_type", "kv_data_type"), Raises(BF16)),
    "pos_encoding_mode": "NONE",
    "logits_soft_cap": 0.5,
    "sm_scale": 0.9,
    "causal": True,
}
MAPS = {
    "block_mask_map": torch.tensor([[[1, 0, 1], [0, 1, 1]], [[1, 1, 0], [1, 0, 1]]], dtype=torch.bool, device=DEVICE),
    "block_row_sz": _int([9, 11], [3, 17]),
    "block_col_sz": _int([5, 10, 9], [8, 9, 7]),
    **{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64},
    "pos_encoding_mode": "ROPE_LLAMA",
}
PLANNER = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": DEVICE}
MATRIX = {"num_rows": ROWS, "num_keys": KEYS, "row_block": 8, "col_block": 8, "max_blocks": 7, **PLANNER}
BLOCKS = {"num_rows": ROWS, "num_keys": KEYS, "num_block_rows": 2, "num_block_cols": 3, "max_pages": 99, **PLANNER}
FORWARD = {**ROPE, "pos_encoding_mode": Raises("ALIBI"), "logits_soft_cap": 0.5, "sm_scale": 0.9}
BY_HEAD = {name: t.transpose(0, 1).contiguous() for name, t in (("q", Q), ("k", K), ("v", V))}
SCALES = dict.fromkeys(("scale_q", "scale_k", "scale_v"), HALF)


def _buffers(*shape: int) -> dict[str, torch.Tensor]:
    return {
        "out": torch.zeros(*shape, 64, dtype=torch.float16, device=DEVICE),
        "lse": torch.zeros(shape, device=DEVICE),
    }


ENCODING = {"pos_encoding_mode": Raises("ALIBI")}
NO_ENCODING = {"pos_encoding_mode": "NONE"}
INIT: dict[str, Any] = {"float_workspace_buffer": workspace()}

SPARSE = [
    Surface(
        "block sparse",
        flashinfer.BlockSparseAttentionWrapper,
        {"init": INIT, "plan": PLAN, "run": {"q": Q, "k": K, "v": V}},
        {
            "plan": {
                **OPTIONS,
                **dict.fromkeys(("q_scale", "k_scale", "v_scale"), Raises(HALF)),
                "o_data_type": BF16,
                "mask": torch.rand(7, 8, 8, generator=_generator).to(DEVICE) < 0.5,
                "packed_mask": torch.full((2 * 16 + 12,), 5, dtype=torch.uint8, device=DEVICE),
            },
            "run": {**SCALES, **LSE, **_buffers(ROWS, 4)},
        },
    ),
    Surface(
        "block sparse, 0.1",
        flashinfer.BlockSparseAttentionWrapper,
        {
            "init": INIT,
            "plan": PLAN | NO_ENCODING,
            "forward": {"q": Q, "k": K, "v": V, "pos_encoding_mode": "ROPE_LLAMA"},
        },
        {"plan": ENCODING, "forward": {**FORWARD, **SCALES}},
    ),
    Surface(
        "variable block sparse",
        flashinfer.VariableBlockSparseAttentionWrapper,
        {"init": INIT, "plan": MAPS, "run": BY_HEAD},
        {"plan": OPTIONS, "run": {**LSE, **_buffers(4, ROWS)}},
    ),
    Surface(
        "variable block sparse, 0.1",
        flashinfer.VariableBlockSparseAttentionWrapper,
        {"init": INIT, "plan": MAPS | NO_ENCODING, "forward": {**BY_HEAD, "pos_encoding_mode": "ROPE_LLAMA"}},
        {"plan": ENCODING, "forward": FORWARD},
    ),
]
