"""Checks of merging, in a group of one process."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from attn_ops import DecodePlanner
from attn_ops.distributed import ContextExchange, ContextShard, RankAgreement, merge_context, shard_plan
from attn_ops.distributed.merge_one_shot import _merge
from attn_ops.errors import ArgumentError, DeviceError, DTypeError, OptionError, RankError, ShapeError

OUT, LSE = torch.ones(3, 2, 4), torch.zeros(3, 2)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"lse": LSE.to("meta")}, "lse"),
        ({"sinks": torch.zeros(2, device="meta")}, "sinks"),
        ({"replicated": (OUT.to("meta"), LSE)}, "the out of replicated"),
        ({"replicated": (OUT, LSE.to("meta"))}, "the lse of replicated"),
    ],
)
def test_devices(arguments: dict[str, Any], name: str, group: dist.ProcessGroup) -> None:
    with pytest.raises(DeviceError, match=f"{name} is on meta; expected cpu as out"):
        merge_context(**{"out": OUT, "lse": LSE, **arguments})


@pytest.mark.parametrize(
    ("replicated", "error"),
    [((OUT[:2], LSE[:2]), ShapeError), ((OUT.half(), LSE), DTypeError), ((OUT, OUT), ShapeError)],
)
def test_states_are_checked_before_they_are_exchanged(
    replicated: Any, error: type[Exception], group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ContextExchange(3, 2, 4, torch.float32, device="cpu")
    exchange.unavailable, exchange.buffers = None, torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(ContextExchange, "merge", lambda *_: pytest.fail("the states were exchanged"))
    with pytest.raises(error, match="replicated is"):
        merge_context(OUT, LSE, replicated=replicated, exchange=exchange)


def test_exchange_on_another_device(group: dist.ProcessGroup) -> None:
    exchange = ContextExchange(3, 2, 4, torch.float32, device="cpu")
    exchange.unavailable, exchange.buffers = None, torch.zeros(1, dtype=torch.int64, device="meta")
    with pytest.raises(DeviceError, match=r"exchange\.buffers is on meta"):
        merge_context(OUT, LSE, exchange=exchange)


def test_exchange_of_another_group(group: dist.ProcessGroup) -> None:
    exchange = ContextExchange(3, 2, 4, torch.float32, device="cpu")
    other = dist.new_group([0])
    with pytest.raises(RankError, match="the exchange is of group"):
        merge_context(OUT, LSE, other, exchange=exchange)
    for call in (merge_context, torch.compile(merge_context, backend="eager", fullgraph=True)):
        assert torch.equal(call(OUT, LSE, group, exchange=exchange)[0], OUT)


def test_exchange_that_failed(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host raises before the next kernel, and again after that."""
    exchange = ContextExchange(3, 2, 4, torch.float32, device="cpu", timeout_s=7)
    exchange.check()  # no memory, no error
    exchange.unavailable, exchange.buffers = None, torch.zeros(2, dtype=torch.int64)
    exchange._error = torch.tensor([2], dtype=torch.int32)
    for call in (exchange.check, lambda: merge_context(OUT, LSE, exchange=exchange)) * 2:
        with pytest.raises(RankError, match=r"a kernel waited more than 7 s for rank 1; .* discard the exchange"):
            call()


@pytest.mark.parametrize("timeout_s", [0, -1.0, 1e7, float("nan")])
def test_time_outs(timeout_s: float, group: dist.ProcessGroup) -> None:
    with pytest.raises(OptionError, match="timeout_s is"):
        ContextExchange(3, 2, 4, device="cpu", timeout_s=timeout_s)


def test_agreements_and_plans_of_a_mesh(group: dist.ProcessGroup) -> None:
    planner = DecodePlanner(1, 1, page_size=1, num_qo_heads=2, num_kv_heads=2, head_dim=8)
    for make in (lambda: RankAgreement(None), lambda: shard_plan(planner.state, None)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="mesh is None; expected a DeviceMesh"):
            make()
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(OptionError, match="timeout is 0"):
        RankAgreement(mesh, timeout=0)
    dist.destroy_process_group()
    for make in (lambda: RankAgreement(mesh), lambda: shard_plan(planner.state, mesh)):
        with pytest.raises(RankError, match="there is no process group"):
            make()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(RankError, match="this process is not in the group"):
        merge_context(OUT, LSE, group)


@pytest.mark.parametrize("make", [lambda: ContextShard.of(interleave=16), lambda: ContextExchange(3, 2, 4)])
def test_without_a_group(make: Any) -> None:
    with pytest.raises(RankError, match="there is no process group"):
        make()


@pytest.mark.parametrize(
    ("values", "name"),
    [(("0", 2, 16), "rank"), ((0, 2.0, 16), "world"), ((0, 2, 16.0), "interleave"), ((None, 2, 16), "rank")],
)
def test_numbers_of_shards(values: Any, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name} is .*; expected an integer"):
        ContextShard(*values)


def test_numbers_of_an_exchange(group: dist.ProcessGroup) -> None:
    """NumPy's integers are Python's where ranks compare them as JSON; a float is refused."""
    shard = ContextShard(np.int64(0), np.int64(2), np.int64(16))  # type: ignore[arg-type]
    assert all(type(n) is int for n in (shard.rank, shard.world, shard.interleave))
    exchange = ContextExchange(np.int64(3), 2, np.int64(4), torch.float32, device="cpu")  # type: ignore[arg-type]
    assert (type(exchange.half_bytes), exchange.half_bytes) == (int, 320)
    with pytest.raises(ArgumentError, match=r"max_rows is 3\.0, of type float"):
        ContextExchange(3.0, 2, 4, device="cpu")  # type: ignore[arg-type]


def test_kernel_gets_contiguous_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    module = types.ModuleType("merge_context")
    module.merge_context = lambda *args: seen.extend(t for t in args if isinstance(t, Tensor))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "attn_ops.kernels.triton.merge_context", module)
    sinks = torch.arange(4.0)[::2]
    v, s = OUT.transpose(0, 1).contiguous().transpose(0, 1), LSE.t().contiguous().t()
    _merge(v, s, torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0, 1 << 20, 9, False, sinks)
    assert all(t.is_contiguous() for t in seen)
    assert torch.equal(seen[-1], sinks)


def test_message_of_states_at_an_odd_offset() -> None:
    from attn_ops.distributed.merge import _packed, _unpacked

    out = torch.randn(3 * 2 * 4 + 1).bfloat16()[1:].view(3, 2, 4)
    merged, _ = _unpacked(_packed(out, LSE)[None], 2, 4, torch.bfloat16)
    assert torch.equal(merged[:, 0], out)


def test_compiled_message_of_states() -> None:
    """Inductor's code for elements of two dtypes in one message."""
    from attn_ops.distributed.merge import _packed, _unpacked

    out, lse = torch.randn(5, 4, 32).bfloat16(), torch.randn(5, 4)

    def sent(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        merged, merged_lse = _unpacked(_packed(out * 2, lse)[None], 4, 32, torch.bfloat16)
        return merged + 0, merged_lse

    merged, merged_lse = torch.compile(sent, fullgraph=True)(out, lse)
    assert torch.equal(merged[:, 0], out * 2)
    assert torch.equal(merged_lse[:, 0], lse)
