"""The contract with callers: the schemas as PyTorch prints them, and Python signatures that agree with them."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import pytest
import torch
from expecttest import TestCase
from helpers.calls import schema

from attn_ops.ops.backends import BACKENDS, Backend
from attn_ops.ops.checks import CHECKS
from attn_ops.ops.options import DEFAULTS, OP_OPTIONS
from attn_ops.ops.schemas import SCHEMAS

REFERENCE = BACKENDS[-1]
TRITON = [(b, op) for b in BACKENDS if b.name == "triton" for op in sorted(b.kernels or {})]


class Snapshot(TestCase):
    """A change here changes the public contract: it needs a line in CHANGELOG.md."""

    maxDiff = None

    def test_schemas(self) -> None:
        wrapped = (textwrap.fill(str(schema(op)), 116, subsequent_indent="    ") for op in SCHEMAS)
        self.assertExpectedInline(
            "\n".join(wrapped),
            """\
attn::plan_decode(Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len, Tensor(a!)[] plan, *, Tensor?
    seq_lens=None, str backend="auto") -> ()
attn::plan_prefill(Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len, Tensor(a!)[]
    plan, *, Tensor? seq_lens=None, str backend="auto") -> ()
attn::batch_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor[] plan, Tensor(a!) workspace, *, float?
    sm_scale=None, float logits_soft_cap=0., int window_left=-1, Tensor? sinks=None, Tensor? kv_scale=None, str
    pos_encoding="NONE", float rope_scale=1., float rope_theta=10000., ScalarType? out_dtype=None, str
    kv_layout="NHD", bool return_lse=False, str backend="auto") -> (Tensor, Tensor)
attn::batch_prefill(Tensor q, Tensor k_cache, Tensor v_cache, Tensor[] plan, Tensor(a!) workspace, *, float?
    sm_scale=None, float logits_soft_cap=0., int window_left=-1, Tensor? sinks=None, Tensor? kv_scale=None, str
    pos_encoding="NONE", float rope_scale=1., float rope_theta=10000., bool causal=False, int window_right=-1,
    Tensor? mask=None, ScalarType? out_dtype=None, str kv_layout="NHD", bool return_lse=False, str backend="auto")
    -> (Tensor, Tensor)
attn::ragged_prefill(Tensor q, Tensor k, Tensor v, Tensor[] plan, Tensor(a!) workspace, *, float? sm_scale=None,
    float logits_soft_cap=0., int window_left=-1, Tensor? sinks=None, Tensor? kv_scale=None, str
    pos_encoding="NONE", float rope_scale=1., float rope_theta=10000., bool causal=False, int window_right=-1,
    Tensor? mask=None, ScalarType? out_dtype=None, str kv_layout="NHD", bool return_lse=False, str backend="auto")
    -> (Tensor, Tensor)
attn::single_prefill(Tensor q, Tensor k, Tensor v, SymInt batch_size=1, *, float? sm_scale=None, float
    logits_soft_cap=0., int window_left=-1, Tensor? sinks=None, Tensor? kv_scale=None, str pos_encoding="NONE",
    float rope_scale=1., float rope_theta=10000., bool causal=False, int window_right=-1, Tensor? mask=None,
    ScalarType? out_dtype=None, str kv_layout="NHD", bool return_lse=False, str backend="auto") -> (Tensor, Tensor)
attn::block_sparse_prefill(Tensor q, Tensor k, Tensor v, Tensor[] plan, Tensor(a!) workspace, *, float?
    sm_scale=None, float logits_soft_cap=0., Tensor? sinks=None, Tensor? kv_scale=None, bool causal=False, Tensor?
    mask=None, ScalarType? out_dtype=None, str kv_layout="NHD", bool return_lse=False, str backend="auto") ->
    (Tensor, Tensor)
attn::batch_mla(Tensor q_nope, Tensor q_pe, Tensor ckv_cache, Tensor kpe_cache, Tensor[] plan, Tensor(a!) workspace,
    *, float? sm_scale=None, float logits_soft_cap=0., int window_left=-1, Tensor? sinks=None, Tensor?
    kv_scale=None, bool causal=False, ScalarType? out_dtype=None, bool return_lse=False, str backend="auto") ->
    (Tensor, Tensor)
attn::append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor batch_indices, Tensor positions,
    Tensor kv_indices, Tensor kv_indptr, *, str kv_layout="NHD", str backend="auto") -> ()
attn::append_mla_kv(Tensor ckv, Tensor kpe, Tensor(a!) ckv_cache, Tensor(b!) kpe_cache, Tensor batch_indices, Tensor
    positions, Tensor kv_indices, Tensor kv_indptr, *, str backend="auto") -> ()
attn::batch_indices_positions(Tensor append_indptr, Tensor seq_lens, SymInt nnz, *, str backend="auto") -> (Tensor,
    Tensor)
attn::seq_lens(Tensor kv_indptr, Tensor kv_last_page_len, int page_size, *, str backend="auto") -> Tensor
attn::page_table(Tensor block_tables, Tensor seq_lens, int page_size, *, str backend="auto") -> (Tensor, Tensor,
    Tensor)
attn::block_sparse_table(Tensor block_mask, Tensor row_indptr, Tensor col_indptr, int page_size, SymInt max_pages,
    *, bool causal=False, str backend="auto") -> (Tensor, Tensor, Tensor, Tensor)
attn::shard_page_table(Tensor kv_indptr, Tensor kv_indices, Tensor kv_last_page_len, int page_size, int rank, int
    world, int interleave, *, str backend="auto") -> (Tensor, Tensor, Tensor)
attn::merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, *, str backend="auto") -> (Tensor, Tensor)
attn::merge_states(Tensor v, Tensor s, *, str backend="auto") -> (Tensor, Tensor)
attn::merge_state_in_place(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask=None, *, str
    backend="auto") -> ()
attn::merge_states_varlen(Tensor v, Tensor s, Tensor indptr, *, str backend="auto") -> (Tensor, Tensor)
attn::packbits(Tensor x, *, str bitorder="big", str backend="auto") -> Tensor
attn::segment_packbits(Tensor x, Tensor indptr, SymInt num_bytes, *, str bitorder="big", str backend="auto") ->
    (Tensor, Tensor)""",
        )


def test_tags() -> None:
    for op in SCHEMAS:
        tags = getattr(torch.ops.attn, op).default.tags
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(tags)


def _parameters(op: str) -> list[tuple[str, bool, Any]]:
    """Name, keyword only, default of each argument of the schema."""
    return [
        (a.name, a.kwarg_only, a.default_value if a.has_default_value() else inspect.Parameter.empty)
        for a in schema(op).arguments
    ]


def _signature(function: Any) -> list[tuple[str, bool, Any]]:
    return [
        (p.name, p.kind is p.KEYWORD_ONLY, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]


@pytest.mark.parametrize("op", SCHEMAS)
def test_checks_have_the_schemas_signature(op: str) -> None:
    """The options of attention, which :class:`AttentionOptions` names, are taken as keywords."""
    options = OP_OPTIONS.get(op, ())
    assert _signature(CHECKS[op]) == [p for p in _parameters(op) if p[0] not in options]
    assert [(name, True, getattr(DEFAULTS, name)) for name in options] == [
        p for p in _parameters(op) if p[0] in options
    ]


def _not_taken(function: Any, op: str) -> set[str]:
    """Options of the schema that a backend's function, otherwise like it, does not take.

    None are missing from one that takes ``**options``, which need not be named.
    """
    named = {name for name, *_ in _signature(function)}
    parameters = [p for p in _parameters(op) if p[0] != "backend"]
    assert _signature(function) == [p for p in parameters if p[0] in named or not p[1]]
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        return set()
    return {name for name, *_ in parameters} - named


@pytest.mark.parametrize("op", SCHEMAS)
def test_reference_has_the_schemas_signature(op: str) -> None:
    assert not _not_taken(REFERENCE.implementation(op), op)


@pytest.mark.parametrize(("backend", "op"), TRITON, ids=[f"{b.label(op)}-{op}" for b, op in TRITON])
def test_triton_has_the_schemas_signature(backend: Backend, op: str) -> None:
    pytest.importorskip("triton")
    assert not _not_taken(backend.implementation(op), op)
