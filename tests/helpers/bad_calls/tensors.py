"""Wrong ranks, dtypes, devices, strides and lengths of the tensors of every op."""

from __future__ import annotations

import torch

from attn_ops.errors import (
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    ShapeError,
)
from helpers.bad_calls.base import (
    Bad,
    dims,
    every_other,
    meta,
    to,
)


def _rows() -> list[Bad]:
    """Rank, dtype, device and stride of every tensor argument, and None."""
    bad = []
    fp8 = " or float8_e4m3fn or float8_e5m2"
    floats, int32 = "float16 or bfloat16 or float32", "int32"
    attention = {"q": (3, floats), "workspace": (1, "float32")}
    paged = {"k_cache": (4, floats + fp8), "v_cache": (4, floats + fp8)}
    dense = {"k": (3, floats + fp8), "v": (3, floats + fp8)}
    table = {"kv_indptr": (1, int32), "kv_indices": (1, int32), "kv_last_page_len": (1, int32)}
    places = dict.fromkeys(("batch_indices", "positions", "kv_indices", "kv_indptr"), (1, int32))
    state = {"v": (3, floats), "s": (2, "float32")}
    tensors: dict[str, dict[str, tuple[int, str]]] = {
        "plan_decode": table,
        "plan_prefill": {"qo_indptr": (1, int32), **table},
        "batch_decode": attention | paged,
        "batch_prefill": attention | paged,
        "ragged_prefill": attention | dense,
        "single_prefill": {"q": (3, floats), **dense},
        "block_sparse_prefill": attention | dense,
        "block_sparse_table": {"block_mask": (3, "bool"), "row_indptr": (2, int32), "col_indptr": (2, int32)},
        "batch_mla": {"q_nope": (3, floats), "ckv_cache": (3, floats + fp8), "kpe_cache": (3, floats + fp8)},
        "append_kv": {**dense, **paged, **places},
        "append_mla_kv": {"ckv": (2, floats + fp8), "kpe": (2, floats + fp8), **places},
        "batch_indices_positions": {"append_indptr": (1, int32), "seq_lens": (1, int32)},
        "seq_lens": {"kv_indptr": (1, int32), "kv_last_page_len": (1, int32)},
        "page_table": {"block_tables": (2, int32), "seq_lens": (1, int32)},
        "merge_state": {"v_a": (3, floats), "s_a": (2, "float32"), "v_b": (3, floats), "s_b": (2, "float32")},
        "merge_states": {"v": (4, floats), "s": (3, "float32")},
        "merge_state_in_place": {**state, "v_other": (3, floats), "s_other": (2, "float32")},
        "merge_states_varlen": {**state, "indptr": (1, int32)},
        "packbits": {"x": (1, "bool or uint8")},
        "segment_packbits": {"x": (1, "bool or uint8"), "indptr": (1, int32)},
    }
    for op, named in tensors.items():
        first = next(iter(named))
        for name, (rank, dtypes) in named.items():
            bad += [
                Bad(op, {name: dims(None)}, ShapeError, f"{name} has rank {rank + 1}", f"{rank}, ["),
                Bad(op, {name: to(torch.float64)}, DTypeError, f"{name} is float64", dtypes),
            ]
            if len(named) > 1:  # PyTorch dispatches by the other tensors
                bad.append(Bad(op, {name: None}, ArgumentTypeError, f"{name} is None", "a tensor ["))
            if name != "workspace":
                what = f"{name} has stride 2 in its last dimension"
                bad.append(Bad(op, {name: every_other}, ShapeError, what, "1"))
            if name != first or op.startswith("plan"):
                bad.append(Bad(op, {name: meta}, DeviceError, f"{name} is on meta", "cpu, where the other tensors are"))
    return bad


def _empty_offsets() -> list[Bad]:
    """Cumulative lengths without their first 0."""
    named = [
        *(("plan_decode", "kv_indptr"), ("plan_prefill", "qo_indptr"), ("plan_prefill", "kv_indptr")),
        *(("batch_indices_positions", "append_indptr"), ("seq_lens", "kv_indptr")),
        *(("merge_states_varlen", "indptr"), ("segment_packbits", "indptr")),
    ]
    return [Bad(op, {name: dims(slice(0))}, ShapeError, f"{name} is [0]", "[") for op, name in named]


TENSORS = [*_rows(), *_empty_offsets()]
