"""What FlashAttention's functions do not support is a typed error that names the alternative, before any write."""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers.flash_requests import DenseCache, dense
from helpers.wrapper_requests import DEVICE, Requests
from torch.fx.experimental.proxy_tensor import make_fx

from attn_ops import errors, flash_attn
from attn_ops.flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from attn_ops.policy import FLASH_ATTENTION

FUNCTIONS = {name: getattr(flash_attn, name) for name in flash_attn.__all__ if name.startswith(("flash", "get"))}

SLOPES = torch.ones(4, device=DEVICE)

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1}, "dropout_p is 0.1, which is not supported: there is no backward and no dropout"),
    ({"alibi_slopes": SLOPES}, "alibi_slopes is given, which is not supported: .*pos_encoding_mode='ALIBI'"),
    ({"attention_chunk": -1}, "attention_chunk is -1; expected 0 to"),
    ({"window_size": (-2, 0)}, r"window_size\[0\] is -2; expected 0 or more tokens"),
    ({"window_size": (0, 1 << 30)}, r"window_size\[1\] is 1073741824; expected 0 or more tokens"),
    ({"window_size": 5}, "window_size is 5; expected a pair"),
    ({"window_size": (2.5, 0)}, r"window_size\[0\] is 2.5, of type float; expected an integer"),
    ({"window_size": (2, True)}, r"window_size\[1\] is True, of type bool; expected an integer"),
    ({"attention_chunk": 4.0}, "attention_chunk is 4.0, of type float; expected an integer"),
    ({"attention_chunk": True}, "attention_chunk is True, of type bool; expected an integer"),
    ({"window_size": torch.tensor([1, 2, 3])}, r"window_size is tensor\(\[1, 2, 3\]\); expected a pair"),
    ({"window_size": torch.tensor([-2, 0])}, r"window_size\[0\] is -2; expected 0 or more tokens"),
    ({"window_size": torch.tensor([2.5, 0.0])}, r"window_size is tensor\(.*; expected a pair"),
    ({"softcap": -1.0}, "softcap is -1.0; expected a positive number"),
    ({"softmax_scale": 0.0}, "softmax_scale is 0.0; expected a positive number"),
    ({"s_aux": SLOPES, "learnable_sink": SLOPES}, "learnable_sink and s_aux are both given"),
    ({"s_aux": SLOPES[:3]}, "sinks has length 3; expected 4"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_options(options: dict[str, Any], message: str) -> None:
    q, k, v = dense(2, 5, 9)
    with pytest.raises(errors.AttnOpsError, match=message):
        flash_attn_func(q, k, v, **options)
    r = Requests((9, 5), (4, 3))
    with pytest.raises(errors.AttnOpsError, match=message):
        flash_attn_varlen_func(r.q, *r.ragged(), r.qo_indptr, r.kv_indptr, 4, 9, **options)


SCHEDULED: dict[str, Any] = {
    "batch_size": 2,
    "max_seqlen_q": 1,
    "max_seqlen_k": 16,
    "num_heads_q": 4,
    "num_heads_kv": 2,
    "headdim": 64,
    "headdim_v": 64,
    "cache_seqlens": 7,
    "page_size": 16,
    "max_seqlen_k_new": 1,
    "attention_chunk": 16,
    "total_q": 2,
    "total_k_new": 2,
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_numbers_of_metadata_are_integers(name: str) -> None:
    """A float or a bool is refused; NumPy's integers are taken."""
    drop = "max_seqlen_q" if name == "total_q" else "page_size" if name == "max_seqlen_k" else None
    given = {key: value for key, value in SCHEDULED.items() if key != drop or drop == "max_seqlen_q"}
    table = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE) if "page_size" in given else None
    get_scheduler_metadata(**{**given, name: np.int64(given[name])}, block_table=table, device=DEVICE)
    for wrong in (float(given[name]), True):
        with pytest.raises(errors.ArgumentError, match=f"{name} is {wrong}, of type {type(wrong).__name__}; expected"):
            get_scheduler_metadata(**{**given, name: wrong}, block_table=table, device=DEVICE)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_tensor_of_windows_in_a_trace(mode: str) -> None:
    """Its numbers are not those of later calls."""
    with pytest.raises(errors.ArgumentError, match=r"window_size is .*; expected a pair"):
        make_fx(lambda *t: flash_attn_func(*t[:3], window_size=t[3]), tracing_mode=mode)(
            *dense(2, 5, 9), torch.tensor([3, 0])
        )


def test_a_tensor_of_windows_in_a_compiled_call() -> None:
    """``torch.compile`` cannot print a tensor, and gives the library's message."""
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="window_size is a tensor of a traced call; expected a pair"):
        compiled(*dense(2, 5, 9), window_size=torch.tensor([3, 0]))


@pytest.mark.parametrize("positions", [(None, True), (None, False), (0.0, True), (None,)], ids=str)
def test_the_positions_of_flash_attention_3(positions: tuple[Any, ...]) -> None:
    """There ``softmax_scale`` and ``causal`` come where ``dropout_p`` and ``softmax_scale`` are here."""
    r, message = Requests((9, 5), (4, 3)), "(dropout_p|softmax_scale) is .*FlashAttention 3's order by name"
    with pytest.raises(errors.ArgumentError, match=message):
        flash_attn_func(*dense(2, 5, 9), *positions)
    with pytest.raises(errors.ArgumentError, match=message):
        flash_attn_varlen_func(r.q, *r.ragged(), r.qo_indptr, r.kv_indptr, 4, 9, *positions)


def test_a_scale_is_no_flag() -> None:
    c = DenseCache((9, 5))
    with pytest.raises(errors.ArgumentError, match="softmax_scale is True; expected a number or None"):
        flash_attn_with_kvcache(torch.ones(2, 1, 4, 64, device=DEVICE).half(), c.k, c.v, softmax_scale=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="lengths on the host")
@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_more_tokens_than_a_sequence_has(name: str) -> None:
    r, used = Requests((9, 5), (4, 3)), torch.tensor([1, 6])
    with pytest.raises(errors.PageTableError, match=rf"{name}\[1\] is 6; expected 0 to [35], as cu_seqlens_"):
        flash_attn_varlen_func(r.q, *r.ragged(), r.qo_indptr, r.kv_indptr, 4, 9, **{name: used})


def test_no_backward() -> None:
    q, k, v = dense(2, 5, 9)
    q.requires_grad_()
    with pytest.raises(errors.GradientError, match="q requires grad; expected inference"):
        flash_attn_func(q, k, v)


def cache_call(**options: Any) -> Any:
    c = DenseCache((9, 5))
    given = {"q": torch.ones(2, 1, 4, 64), "k_cache": c.k, "v_cache": c.v, "cache_seqlens": c.cache_seqlens}
    new = torch.ones(2, 1, 2, 64, dtype=torch.float16, device=DEVICE)
    given |= dict.fromkeys(("k", "v"), new)
    given = {name: t.half().to(DEVICE) if name == "q" else t for name, t in given.items()}
    before = c.k.clone()
    try:
        return flash_attn_with_kvcache(**{**given, **options})
    finally:
        assert torch.equal(c.k.nan_to_num(), before.nan_to_num())


TABLE = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)

CACHE_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"cache_leftpad": TABLE}, r"cache_leftpad is \[2, 1\]; expected \[batch\]"),
    ({"block_table": TABLE, "cache_batch_idx": TABLE}, r"cache_batch_idx is \[2, 1\]; expected \[batch\]"),
    ({"block_table": TABLE, "page_table": TABLE}, "block_table and page_table are both given"),
    ({"block_table": TABLE[:1]}, "block_table has 1 rows; expected 2, as q has requests"),
    ({"v": None}, "v is missing"),
    ({"cache_seqlens": None}, "cache_seqlens is missing"),
    ({"cache_seqlens": 40}, "a request has 41 tokens and its cache capacity for 40"),
    (
        {"cache_seqlens": torch.tensor([3, 40])},
        "a request has 41 tokens and its cache capacity for 40; expected at most 40; pass a larger cache",
    ),
    *(
        ({"cache_seqlens": given}, "a request has 41 tokens and its cache capacity for 40; expected at most 40")
        for given in (41, torch.tensor([3, 41]))
    ),
    ({"cache_seqlens": -1}, "cache_seqlens is -1; expected 0 or more tokens; correct it"),
    ({"cache_seqlens": torch.tensor([3, -1])}, "cache_seqlens has a length of -1"),
    ({"k": torch.ones(3, 1, 2, 64)}, r"k is \[3, 1, 2, 64\]; expected \[2, 1, ...\]"),
    ({"rotary_cos": torch.ones(9, 4)}, "rotary_sin is missing; expected both tables or none"),
    (
        {"rotary_cos": torch.ones(0, 4), "rotary_sin": torch.ones(0, 4)},
        r"rotary_cos is \[0, 4\]; expected .* with rows",
    ),
    ({"rotary_cos": torch.ones(64, 40), "rotary_sin": torch.ones(64, 40)}, "rotary_dim at most 64"),
    ({"rotary_cos": torch.ones(64, 4), "rotary_sin": torch.ones(64, 4), "k": None, "v": None}, "k is missing"),
    *(
        (
            {
                "rotary_cos": torch.ones(64, 32),
                "rotary_sin": torch.ones(64, 32),
                "rotary_interleaved": interleaved,
                "k": torch.ones(2, 1, 2, 32).half(),
            },
            "k has head_dim 32; expected 64 as in k_cache",
        )
        for interleaved in (False, True)
    ),
    (
        {"rotary_cos": torch.ones(64, 4, requires_grad=True), "rotary_sin": torch.ones(64, 4)},
        "rotary_cos requires grad; expected inference",
    ),
    ({"k_cache": torch.ones(2, 40, 2, 64).half().requires_grad_()}, "k_cache requires grad; .* detach k_cache"),
    ({"qv": torch.ones(2, 1, 4, 64).half()}, "qv is given and k_cache has 2 KV heads; expected 1"),
    (
        {"qv": torch.ones(2, 1, 4, 64).half(), "k_cache": torch.ones(2, 40, 1, 64).half()},
        "qv is given and v_cache has 2 KV heads; expected 1",
    ),
    ({"q": torch.ones(2, 1, 4, 64, dtype=torch.float32)}, "k_cache is float16 and q float32"),
    ({"q": torch.ones(2, 1, 3, 64).half()}, "3 query heads do not share 2 KV heads evenly"),
    ({"q": torch.ones(2, 4, 64).half()}, r"q is \[2, 4, 64\]; expected \[batch, seqlen, num_heads, head_dim\]"),
    ({"k_cache": 3}, "k_cache is 3, of type int; expected a tensor"),
    (
        {"k_cache": torch.ones(2, 40, 64)},
        r"\[2, 40, 64\]; expected \[batch_cache, seqlen_cache, num_kv_heads, head_dim\]",
    ),
    (
        {"k_cache": torch.ones(2, 40, 64), "block_table": TABLE},
        r"\[2, 40, 64\]; expected \[pages, page_size, num_kv_heads, head_dim\]",
    ),
]


@pytest.mark.parametrize(("options", "message"), CACHE_CALLS, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_cache_calls(options: dict[str, Any], message: str) -> None:
    moved = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    if DEVICE == "cuda" and "cache_seqlens" in options and not isinstance(options["cache_seqlens"], int | None):
        moved["cache_seqlens"] = options["cache_seqlens"]  # lengths on a GPU are not read
    with pytest.raises(errors.AttnOpsError, match=message):
        cache_call(**moved)


@pytest.mark.gpu
def test_an_append_beyond_a_dense_cache_on_a_gpu_is_refused_by_lengths_on_the_host() -> None:
    for given in (torch.tensor([3, 40]), torch.tensor([3, 40], dtype=torch.int32)):
        with pytest.raises(errors.PageTableError, match="a request has 41 tokens and its cache capacity for 40"):
            cache_call(cache_seqlens=given)


@pytest.mark.parametrize("kv_heads", [0, 3])
def test_query_heads_that_do_not_share_the_kv_heads(kv_heads: int) -> None:
    """The error comes from the function, before it plans."""
    kv = torch.ones(2, 9, kv_heads, 64, dtype=torch.float16, device=DEVICE)
    one, rows = (torch.ones(2, n, 4, 64, dtype=torch.float16, device=DEVICE) for n in (1, 3))
    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE) for n in (3, 9)]
    calls: list[Any] = [
        lambda: flash_attn_func(rows, kv, kv),
        lambda: flash_attn_varlen_func(rows.flatten(0, 1), kv.flatten(0, 1), kv.flatten(0, 1), *offsets),
        lambda: flash_attn_varlen_func(rows.flatten(0, 1), kv, kv, *offsets, block_table=offsets[0][:2, None]),
        lambda: flash_attn_with_kvcache(one, kv, kv, cache_seqlens=3),
        lambda: flash_attn_with_kvcache(rows, kv, kv, cache_seqlens=3),
    ]
    if kv_heads:
        calls.append(lambda: get_scheduler_metadata(2, 1, 9, 4, kv_heads, 64, 3, device=DEVICE))
    for call in calls:
        message = rf"^(flash_attn_\w+|get_scheduler_metadata): 4 query heads do not share {kv_heads} KV heads evenly"
        with pytest.raises(errors.ShapeError, match=message):
            call()


@pytest.mark.parametrize(("dims", "name"), [((0, 0), "head_dim"), ((64, 0), "head_dim_v")])
def test_heads_without_elements(dims: tuple[int, int], name: str) -> None:
    q, k = (torch.ones(2, 3, heads, dims[0], dtype=torch.float16, device=DEVICE) for heads in (4, 2))
    v = torch.ones(2, 3, 2, dims[1], dtype=torch.float16, device=DEVICE)
    rows, offsets = [t.flatten(0, 1) for t in (q, k, v)], torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE)
    calls: list[Any] = [
        lambda: flash_attn_func(q, k, v),
        lambda: flash_attn_varlen_func(*rows, offsets, offsets),
        lambda: flash_attn_varlen_func(rows[0], k, v, offsets, offsets, block_table=offsets[:2, None]),
        lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=3),
        lambda: flash_attn_with_kvcache(q[:, :1], k, v, k[:, :1], v[:, :1], cache_seqlens=2),
        lambda: flash_attn_with_kvcache(q, k[:, :, :1], v[:, :, :1], cache_seqlens=3, qv=q),
    ]
    for call in calls:
        with pytest.raises(errors.OptionError, match=rf"^flash_attn_\w+: {name} is 0; expected at least 1"):
            call()


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_more_tokens_than_a_cache_holds(paged: bool) -> None:
    """A number and a tensor are refused alike."""
    refused = []
    for seqlens in (41, torch.tensor([3, 41])):
        with pytest.raises(errors.PageTableError, match="a request has 41 tokens and ") as found:
            cache_call(cache_seqlens=seqlens, k=None, v=None, **({"block_table": TABLE} if paged else {}))
        refused.append(str(found.value))
    assert len(set(refused)) == 1


@pytest.mark.skipif(DEVICE == "cuda", reason="positions on the host")
def test_positions_beyond_the_rotary_tables() -> None:
    table = torch.ones(9, 4)
    tables = {"rotary_cos": table, "rotary_sin": table}
    with pytest.raises(errors.PageTableError, match="a token has position 9 and the rotary tables 9 rows"):
        cache_call(**tables)
    for starts in (12, torch.tensor([12, 3])):
        with pytest.raises(errors.PageTableError, match="a token has position 12 and the rotary tables 9 rows"):
            cache_call(**tables, rotary_seqlens=starts)
    with pytest.raises(errors.PageTableError, match="rotary_seqlens has a length of -1"):
        cache_call(**tables, rotary_seqlens=torch.tensor([-1, 3]))
    q = torch.ones(2, 4, 4, 64)
    with pytest.raises(errors.PageTableError, match="a token has position 11 and the rotary tables 9 rows"):
        cache_call(**tables, q=q, cache_seqlens=8, causal=True)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k", "max_seqlen_k_new", "total_q", "total_k_new"])
def test_sizes_beyond_int32(name: str) -> None:
    with pytest.raises(errors.AttnOpsError, match=f"{1 << 40}|{2 << 40}"):
        get_scheduler_metadata(**{**ordinary_calls()["get_scheduler_metadata"], name: 1 << 40})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads_q": 1 << 40}, f"num_heads_q is {1 << 40}; expected at most 2147483647, an int32; change it"),
        ({"cache_seqlens": torch.ones(3)}, "cache_seqlens is [3]; expected [2], one per request; correct it"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_metadata_in_a_graph(options: dict[str, Any], message: str) -> None:
    """The messages have numbers for symbolic sizes."""
    given, message = {**ordinary_calls()["get_scheduler_metadata"], **options}, f"get_scheduler_metadata: {message}"
    with pytest.raises(errors.AttnOpsError, match=re.escape(message)):
        get_scheduler_metadata(**given)
    compiled = torch.compile(get_scheduler_metadata, fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(Exception, match=re.escape(message)):
        compiled(**given)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_with_kvcache"])
def test_a_latent_query_without_dimensions(name: str) -> None:
    (q, k, v), call = dense(2, 3, 9, heads=(4, 1)), FUNCTIONS[name]
    message = f"{name}: qv is a tensor without dimensions; expected the dimensions that the documentation names; resh"
    with pytest.raises(errors.ShapeError, match=f"^{message}"):
        call(q, k, v, qv=q[0, 0, 0, 0])
    with pytest.raises(Exception, match=message):
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, qv=q[0, 0, 0, 0])


@pytest.mark.parametrize("form", [None, torch.empty(0), torch.empty(0, 2, 2)], ids=str)
def test_metadata_without_a_form(form: Any) -> None:
    given = ordinary_calls()["get_scheduler_metadata"]
    made = get_scheduler_metadata(**given)._replace(form=form)
    with pytest.raises(errors.ArgumentError, match=r"form of scheduler_metadata is .*get_scheduler_metadata"):
        cache_call(scheduler_metadata=made)


USED: list[tuple[dict[str, Any], str]] = [
    ({"out": torch.ones(2, 7, 4, 64)}, r"out is \[2, 7, 4, 64\]; expected \[7, 4, 64\]"),
    ({"out": torch.ones(5, 4, 64)}, r"out is \[5, 4, 64\]; expected \[7, 4, 64\]"),
    ({"out": torch.ones(7, 4, 64, dtype=torch.int32)}, "out is int32; expected a floating-point dtype; pass"),
    ({"v": torch.ones(12, 2, 64).half()}, r"v is \[12, 2, 64\]; expected 14 tokens, as k"),
    ({"qv": torch.ones(6, 4, 64).half()}, r"qv is \[6, 4, 64\]; expected 7 tokens, as q"),
]


@pytest.mark.parametrize(("options", "message"), USED, ids=lambda x: ",".join(x) if isinstance(x, dict) else "")
def test_used_lengths_of_other_tensors(options: dict[str, Any], message: str) -> None:
    r = Requests((9, 5), (4, 3))
    given = dict(zip(("k", "v"), r.ragged(), strict=True)) | {name: t.to(DEVICE) for name, t in options.items()}
    used = {"seqused_q": r.qo_indptr.diff(), "seqused_k": r.kv_indptr.diff()}
    with pytest.raises(errors.AttnOpsError, match=message):
        flash_attn_varlen_func(q=r.q, cu_seqlens_q=r.qo_indptr, cu_seqlens_k=r.kv_indptr, **given, **used)


@pytest.mark.parametrize("option", [{"cache_leftpad": torch.zeros(2, dtype=torch.int32)}, {"attention_chunk": 3}])
def test_a_cache_without_room(option: dict[str, Any]) -> None:
    empty = {"k_cache": torch.ones(2, 0, 2, 64).half(), "cache_seqlens": 0, "k": None, "v": None, **option}
    with pytest.raises(errors.OptionError, match="seqlen_cache is 0"):
        cache_call(**{name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in empty.items()})


def test_other_errors() -> None:
    q, k, v = dense(2, 5, 9)
    with pytest.raises(errors.ShapeError, match=r"v is \[1, 9, 2, 64\]; expected \[2, 9, ...\]"):
        flash_attn_func(q, k, v[:1])
    with pytest.raises(errors.ShapeError, match="stack 3 tensors in dimension -3"):
        flash_attn_qkvpacked_func(torch.stack((q, q), 2))
    with pytest.raises(errors.ShapeError, match=r"qkv is .*; expected heads in dimension 2: 3 of queries, then the"):
        flash_attn_qkvpacked_func(q, num_heads_q=3)
    with pytest.raises(errors.ArgumentError, match=r"num_heads_q is 2.0, of type float; expected an integer"):
        flash_attn_qkvpacked_func(q, num_heads_q=2.0)  # type: ignore[arg-type]
    r = Requests((9, 5), (4, 3))
    with pytest.raises(errors.ArgumentError, match="cu_seqlens_k is missing"):
        flash_attn_varlen_func(r.q, *r.ragged(), r.qo_indptr)
    with pytest.raises(errors.ShapeError, match=r"cu_seqlens_k is \[2\]; expected \[3\]"):
        flash_attn_varlen_func(r.q, *r.ragged(), r.qo_indptr, r.kv_indptr[:2])
    with pytest.raises(errors.ArgumentError, match="cu_seqlens_q is of type list; expected an int32 tensor"):
        flash_attn_varlen_func(r.q, *r.ragged(), [0, 4, 7], r.kv_indptr)  # type: ignore[arg-type]


def test_every_argument_is_in_one_table_or_has_an_effect() -> None:
    """The tables name arguments that exist, and each at most once."""
    names = {name for function in FUNCTIONS.values() for name in inspect.signature(function).parameters}
    assert not FLASH_ATTENTION.no_effect.keys() & FLASH_ATTENTION.unsupported.keys()
    assert names >= FLASH_ATTENTION.no_effect.keys()
    assert names >= FLASH_ATTENTION.unsupported.keys()


@pytest.mark.parametrize("name", sorted(FLASH_ATTENTION.no_effect.keys() - {"max_seqlen", "has_softcap"}))
def test_arguments_without_an_effect(name: str) -> None:
    r = Requests((9, 5), (4, 3))
    arguments = (r.q, *r.ragged(), r.qo_indptr, r.kv_indptr)
    if name not in inspect.signature(flash_attn_varlen_func).parameters:
        pytest.skip("not of this function")
    assert torch.equal(flash_attn_varlen_func(*arguments, **{name: 7}), flash_attn_varlen_func(*arguments))


def ordinary_calls() -> dict[str, dict[str, Any]]:
    """Arguments of a call of each function."""
    q, k, v = dense(2, 3, 3)
    r, c, table = Requests((9, 5), (4, 3)), DenseCache((9, 5)), torch.ones(64, 8, device=DEVICE)
    cumulative = {"cu_seqlens_q": r.qo_indptr, "cu_seqlens_k": r.kv_indptr}
    keys, values = r.ragged()
    new = {"k": k, "v": v, "cache_seqlens": c.cache_seqlens, "rotary_cos": table, "rotary_sin": table}
    sizes = {"batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 9, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 64}
    return {
        "flash_attn_func": {"q": q, "k": k, "v": v},
        "flash_attn_qkvpacked_func": {"qkv": torch.stack((q, q, q), 2)},
        "flash_attn_kvpacked_func": {"q": q, "kv": torch.stack((k, v), 2)},
        "flash_attn_varlen_func": {"q": r.q, "k": keys, "v": values, **cumulative},
        "flash_attn_varlen_qkvpacked_func": {"qkv": torch.stack((r.q,) * 3, 1), "cu_seqlens": r.qo_indptr},
        "flash_attn_varlen_kvpacked_func": {"q": r.q, "kv": torch.stack((keys, values), 1), **cumulative},
        "flash_attn_with_kvcache": {"q": q, "k_cache": c.k, "v_cache": c.v, **new},
        "flash_attn_combine": {"out_partial": torch.stack((q, q)), "lse_partial": torch.stack((q, q))[..., 0]},
        "get_scheduler_metadata": {**sizes, "cache_seqlens": c.cache_seqlens},
    }


WRONG_VALUES = [
    object(),
    "x",
    [1.5],
    -1,
    3,
    1.5,
    10**30,
    {},
    torch.zeros(3),
    torch.zeros(2, 2, dtype=torch.int32),
    torch.zeros(()),
    torch.zeros(2, 3, 4, 64).half(),
    torch.zeros(4, dtype=torch.complex64),
]

PARAMETERS = [
    (name, parameter)
    for name, function in FUNCTIONS.items()
    for parameter in inspect.signature(function).parameters
    if parameter not in ("args", "kwargs", "device")
]


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_wrong_values_work_or_are_typed_errors(name: str, parameter: str) -> None:
    given = ordinary_calls()[name]
    FUNCTIONS[name](**given)
    for value in WRONG_VALUES:
        moved = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        with contextlib.suppress(errors.AttnOpsError):
            FUNCTIONS[name](**{**given, parameter: moved})


def test_an_argument_without_effect_is_not_blamed_for_another() -> None:
    given = ordinary_calls()["flash_attn_varlen_func"]
    with pytest.raises(errors.ArgumentError, match="flash_attn_varlen_func: softmax_scale"):
        FUNCTIONS["flash_attn_varlen_func"](**{**given, "max_seqlen_q": object(), "softmax_scale": [1]})
