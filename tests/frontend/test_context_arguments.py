"""FlashInfer's arguments of context parallelism: every rank of a group in one process, merged, against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.oracle import GARBAGE, Expected
from helpers.page_tables import indptr, int32
from torch import Tensor

from attn_ops.errors import ArgumentError, AttnOpsError, OptionError, PageTableError, ShapeError, UnsupportedError
from attn_ops.frontend.deepseek import trtllm_batch_decode_with_kv_cache_mla
from attn_ops.frontend.trtllm import trtllm_batch_decode_with_kv_cache

PAGE, PAGES = 4, 48
LENS = (37, 6, 5, 90)
"""Tokens of each request on all ranks, its query rows included."""


class Ranks:
    """The keys of a batch, dealt to the ranks token by token, in a poisoned cache ``[pages, PAGE, *heads, dim]``."""

    def __init__(self, tokens: Sequence[Tensor], world: int, stored: int = 0) -> None:
        """``stored``: tokens behind the last query row that each rank has in its cache too."""
        generator = torch.Generator().manual_seed(1)
        self.caches, self.tables = [], []
        for rank in range(world):
            own = [torch.cat((t, torch.full((stored, *t.shape[1:]), 1e4)))[rank::world] for t in tokens]
            pages = [-(-len(t) // PAGE) for t in own]
            numbers = torch.randperm(PAGES, generator=generator)[: sum(pages)].int().split(pages)
            cache = torch.full((PAGES, PAGE, *tokens[0].shape[1:]), torch.nan)
            table = torch.full((len(own), max(pages)), GARBAGE, dtype=torch.int32)
            for b, (t, page) in enumerate(zip(own, numbers, strict=True)):
                table[b, : len(page)] = page
                i = torch.arange(len(t))
                cache[page[i // PAGE], i % PAGE] = t
            self.caches.append(cache)
            self.tables.append({"block_tables": table, "seq_lens": int32([len(t) for t in own])})


def _check(call: Callable[[int], tuple[Tensor, Tensor]], world: int, expected: Expected) -> None:
    states = [call(rank) for rank in range(world)]
    out, lse = (torch.stack([state[i] for state in states], 1) for i in (0, 1))
    expected.check(*torch.ops.attn.merge_states(out, lse))


def _tokens(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, *shape, generator=generator) for n in LENS]


def _queries(rows: Sequence[int], *shape: int) -> Tensor:
    return torch.randn(sum(rows), *shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        ((1, 1, 1, 1), {}),
        ((4, 4, 4, 4), {}),
        ((1, 6, 0, 5), {}),
        ((1, 1, 1, 1), {"window_left": 11}),
        ((3, 3, 3, 3), {"window_left": 7, "bmm1_scale": 0.3, "bmm2_scale": 2.0, "kv_layout": "NHD"}),
    ],
)
def test_decode(world: int, rows: tuple[int, ...], options: dict[str, Any]) -> None:
    tokens, q = _tokens(2, 2, 16), _queries(rows, 4, 16)  # keys and values, KV heads, elements
    uniform = len(set(rows)) == 1
    heads_first = options.get("kv_layout", "HND") == "HND"
    given = {"q_len_per_req": rows[0]} if uniform else {"q_len_per_req": None, "cum_seq_lens_q": indptr(rows)}
    ranks = Ranks(tokens, world, stored=5)  # those of rejected tokens, which no row sees

    def call(rank: int) -> tuple[Tensor, Tensor]:
        cache = ranks.caches[rank].transpose(1, 2)
        cache = cache.transpose(2, 3) if heads_first else cache
        return trtllm_batch_decode_with_kv_cache(
            q,
            cache,
            torch.zeros(0),
            **ranks.tables[rank],
            **given,
            **{"bmm1_scale": 0.25, **options},
            max_seq_len=0,
            cp_world=world,
            cp_rank=rank,
            causal_seqlens_kv_global=int32(LENS) - int32(rows),
            return_lse=True,
        )

    factor = options.get("bmm2_scale", 1.0)
    requests = [(r, t[:, 0], t[:, 1] * factor) for r, t in zip(q.split(rows), tokens, strict=True)]
    scale, window = options.get("bmm1_scale", 0.25), options.get("window_left", -1)
    _check(call, world, Expected.of(requests, causal=True, sm_scale=scale, window_left=window))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("rows", [(1, 1, 1, 1), (3, 3, 3, 3), (1, 6, 0, 5)])
def test_mla(world: int, rows: tuple[int, ...]) -> None:
    tokens, q = _tokens(40), _queries(rows, 4, 40)
    uniform = len(set(rows)) == 1
    query = q.unflatten(0, (-1, rows[0])) if uniform else q
    ranks = Ranks(tokens, world, stored=3)

    def call(rank: int) -> tuple[Tensor, Tensor]:
        out, lse = trtllm_batch_decode_with_kv_cache_mla(
            query,
            ranks.caches[rank],
            torch.zeros(0),
            qk_nope_head_dim=32,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            **ranks.tables[rank],
            max_seq_len=0,
            bmm1_scale=0.2,
            cum_seq_lens_q=None if uniform else indptr(rows),
            enable_dcp=True,
            cp_world=world,
            cp_rank=rank,
            causal_seqlens_kv_global=torch.tensor(LENS),
            return_lse=True,
        )
        return out.view(-1, 4, 32), lse

    requests = [(r, t[:, None], t[:, None, :32]) for r, t in zip(q.split(rows), tokens, strict=True)]
    _check(call, world, Expected.of(requests, causal=True, sm_scale=0.2))


def _decode(rows: int = 1, **changes: Any) -> Any:
    q, cache = torch.zeros(2 * rows, 4, 16), torch.zeros(4, 2, 2, PAGE, 16)
    tables = {"block_tables": int32([[2, 0], [1, 3]]), "seq_lens": int32([5, 4])}
    arguments = {"max_seq_len": 8, "q_len_per_req": rows, "cp_world": 2, "cp_rank": 1, **tables, **changes}
    return trtllm_batch_decode_with_kv_cache(q, cache, torch.zeros(0), **arguments)


def _mla(rows: int = 1, **changes: Any) -> Any:
    q, cache = torch.zeros(2, rows, 4, 40), torch.zeros(4, PAGE, 40)
    tables = {"block_tables": int32([[2, 0], [1, 3]]), "seq_lens": int32([5, 4])}
    sizes: dict[str, Any] = {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "max_seq_len": 8}
    arguments = {"enable_dcp": True, "cp_world": 2, "cp_rank": 1, **tables, **changes}
    return trtllm_batch_decode_with_kv_cache_mla(q, cache, torch.zeros(0), **sizes, **arguments)


GLOBAL = {"causal_seqlens_kv_global": int32([10, 9])}


@pytest.mark.parametrize("call", [_decode, _mla])
def test_one_row_needs_no_positions(call: Any) -> None:
    """Without the lengths on all ranks it sees every key of the rank."""
    assert torch.equal(call(), call(**GLOBAL))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("call", [_decode, _mla])
def test_a_world_of_one_is_the_call_on_all_keys(call: Any, rows: int) -> None:
    """With the lengths of all ranks, and without them."""
    world, sinks = {"cp_world": 1, "cp_rank": 0}, torch.tensor([0.5, 1.0, 2.0, 3.0])
    plain = call(rows, **world, **({"enable_dcp": False} if call is _mla else {}), sinks=sinks)
    lengths = int32([5, 4]) - (rows if call is _decode else 0)
    assert torch.equal(call(rows, **world, sinks=sinks), plain)
    assert torch.equal(call(rows, **world, sinks=sinks, causal_seqlens_kv_global=lengths), plain)


def test_lengths_beyond_int32_do_not_wrap() -> None:
    with pytest.raises(PageTableError, match="causal_seqlens_kv_global has a number beyond int32"):
        _decode(causal_seqlens_kv_global=torch.tensor([2**32 + 10, 9]))


def test_traced() -> None:
    compiled = torch.compile(lambda: _decode(rows=3, **GLOBAL), backend="eager", fullgraph=True)
    assert torch.equal(compiled(), _decode(rows=3, **GLOBAL))


@pytest.mark.parametrize(
    ("call", "arguments", "error", "words"),
    [
        (_decode, {"rows": 2}, ArgumentError, "causal_seqlens_kv_global is missing"),
        (_decode, {"window_left": 5}, ArgumentError, "causal_seqlens_kv_global is missing"),
        (_mla, {"rows": 2}, ArgumentError, "causal_seqlens_kv_global is missing"),
        (_decode, {"sinks": torch.zeros(4)}, OptionError, "sinks is given with the keys of one of 2 ranks"),
        (_mla, {"sinks": torch.zeros(4)}, OptionError, "sinks is given with the keys of one of 2 ranks"),
        (_decode, {"mask": torch.zeros(2, 1, 1, dtype=torch.uint16)}, OptionError, "mask is given with the keys"),
        (_decode, {"cp_rank": 2}, OptionError, "cp_rank is 2; expected 0 to 1"),
        (_decode, {"cp_world": -2}, OptionError, "cp_world is -2; expected at least 1"),
        (_decode, {"cp_rank": True}, ArgumentError, "cp_rank is True, of type bool"),
        (_decode, {"causal_seqlens_kv_global": int32([10])}, ShapeError, "one per request"),
        (_decode, {"causal_seqlens_kv_global": int32([-1, 1])}, PageTableError, "a length of -1"),
        (_decode, {"cp_world": 1}, OptionError, "cp_rank is 1; expected 0 to 0"),
        (_mla, {"enable_dcp": False}, UnsupportedError, "cp_world is 2, which is not supported"),
        (_mla, {"enable_dcp": False, "cp_world": 1}, UnsupportedError, "cp_rank is 1, which is not supported"),
        (
            _mla,
            {"enable_dcp": False, "cp_world": 1, "cp_rank": 0, **GLOBAL},
            UnsupportedError,
            "causal_seqlens_kv_global is given, which is not supported: .* enable_dcp=True",
        ),
    ],
)
def test_bad_arguments(call: Any, arguments: dict[str, Any], error: type[AttnOpsError], words: str) -> None:
    with pytest.raises(error, match=words):
        call(**arguments)
