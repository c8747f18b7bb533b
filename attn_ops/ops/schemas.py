"""The schema of every public op: the library's contract with the dispatcher, the exporter and C++ callers.

A schema changes only with a line in CHANGELOG.md; ``tests/ops/test_schemas.py`` holds the snapshot.

Conventions
-----------
* ``plan`` is a NamedTuple of tensors (:mod:`attn_ops.plan.state`), flattened in field order.
* ``workspace`` is scratch memory of the planner. It is written by the op and means nothing between calls.
* Attention ops return ``(out, lse)``; ``lse`` has zero elements unless ``return_lse``. LSE is base 2.
* ``sinks`` is float32 ``[num_qo_heads]``; ``kv_scale`` float32 ``[2]``, the scales of an FP8 K and V;
  ``mask`` uint8, the packed custom mask of all requests, which replaces ``causal``. Its length follows from
  lengths that a plan may hold on a GPU, so ops with a plan do not check it: a bit beyond its end hides its key.
* ``backend`` is ``"auto"`` or the name of one backend, which then never falls back.
"""

from attn_ops.ops.options import options_schema

NAMESPACE = "attn"

_BACKEND = 'str backend="auto"'
_RESULT = f"bool return_lse=False, {_BACKEND}"
_LAYOUT = f'str kv_layout="NHD", {_RESULT}'

SCHEMAS: dict[str, str] = {
    "plan_decode": (
        "(Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len, Tensor(a!)[] plan, *, "
        'Tensor? seq_lens=None, str backend="auto") -> ()'
    ),
    "plan_prefill": (
        "(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len, "
        'Tensor(a!)[] plan, *, Tensor? seq_lens=None, str backend="auto") -> ()'
    ),
    "batch_decode": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor[] plan, Tensor(a!) workspace, *, "
        f"{options_schema('batch_decode')}, {_LAYOUT}) -> (Tensor, Tensor)"
    ),
    "batch_prefill": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor[] plan, Tensor(a!) workspace, *, "
        f"{options_schema('batch_prefill')}, {_LAYOUT}) -> (Tensor, Tensor)"
    ),
    "ragged_prefill": (
        "(Tensor q, Tensor k, Tensor v, Tensor[] plan, Tensor(a!) workspace, *, "
        f"{options_schema('ragged_prefill')}, {_LAYOUT}) -> (Tensor, Tensor)"
    ),
    "single_prefill": (
        "(Tensor q, Tensor k, Tensor v, SymInt batch_size=1, *, "
        f"{options_schema('single_prefill')}, {_LAYOUT}) -> (Tensor, Tensor)"
    ),
    "block_sparse_prefill": (
        "(Tensor q, Tensor k, Tensor v, Tensor[] plan, Tensor(a!) workspace, *, "
        f"{options_schema('block_sparse_prefill')}, {_LAYOUT}) -> (Tensor, Tensor)"
    ),
    "batch_mla": (
        "(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor[] plan, Tensor(a!) workspace, *, "
        f"{options_schema('batch_mla')}, {_RESULT}) -> (Tensor, Tensor)"
    ),
    "append_kv": (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor batch_indices, "
        "Tensor positions, Tensor kv_indices, Tensor kv_indptr, *, "
        'str kv_layout="NHD", str backend="auto") -> ()'
    ),
    "append_mla_kv": (
        "(Tensor ckv, Tensor kpe, Tensor(a!) ckv_cache, Tensor(b!) kpe_cache, Tensor batch_indices, "
        'Tensor positions, Tensor kv_indices, Tensor kv_indptr, *, str backend="auto") -> ()'
    ),
    "batch_indices_positions": (
        '(Tensor append_indptr, Tensor seq_lens, SymInt nnz, *, str backend="auto") -> (Tensor, Tensor)'
    ),
    "seq_lens": '(Tensor kv_indptr, Tensor kv_last_page_len, int page_size, *, str backend="auto") -> Tensor',
    "page_table": (
        '(Tensor block_tables, Tensor seq_lens, int page_size, *, str backend="auto") -> (Tensor, Tensor, Tensor)'
    ),
    "block_sparse_table": (
        "(Tensor block_mask, Tensor row_indptr, Tensor col_indptr, int page_size, SymInt max_pages, *, "
        'bool causal=False, str backend="auto") -> (Tensor, Tensor, Tensor, Tensor)'
    ),
    "shard_page_table": (
        "(Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len, int page_size, int rank, int world, "
        'int interleave, *, str backend="auto") -> (Tensor, Tensor, Tensor)'
    ),
    "merge_state": ('(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, *, str backend="auto") -> (Tensor, Tensor)'),
    "merge_states": '(Tensor v, Tensor s, *, str backend="auto") -> (Tensor, Tensor)',
    "merge_state_in_place": (
        '(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask=None, *, str backend="auto") -> ()'
    ),
    "merge_states_varlen": '(Tensor v, Tensor s, Tensor indptr, *, str backend="auto") -> (Tensor, Tensor)',
    "packbits": '(Tensor x, *, str bitorder="big", str backend="auto") -> Tensor',
    "segment_packbits": (
        '(Tensor x, Tensor indptr, SymInt num_bytes, *, str bitorder="big", str backend="auto") -> (Tensor, Tensor)'
    ),
}
