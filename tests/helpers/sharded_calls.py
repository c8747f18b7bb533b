"""Calls of the ops on DTensors: what the cases of tensor parallelism share."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree

from attn_ops.distributed.sharding_table import SHARDED_DIMS, Axis

DEVICE = os.environ.get("RANKS_ON", "cpu")
Group = dist.ProcessGroup


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tp",))


def axis_of(op: str, name: str) -> Axis:
    return next(axis for axis in SHARDED_DIMS[op] if axis.name == name)


def part(t: Tensor, dim: int | None) -> DTensor:
    """This rank's view of ``t`` as a DTensor, ``t`` itself if ``dim`` is None."""
    local = t if dim is None else t.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(local, mesh(), [placement], run_check=False, shape=t.shape, stride=t.stride())


def sharded(op: str, arguments: dict[str, Any], axis: Axis | None, plain: bool = True) -> dict[str, Any]:
    """The arguments of a call on DTensors. Tensors that are never sharded stay ``plain``, or are replicated."""
    layout = arguments.get("kv_layout", "NHD")
    names = {name for a in SHARDED_DIMS[op] for name in a.dims}

    def convert(name: str, t: Any) -> Any:
        dim = axis.of_layout(layout).get(name) if axis else None
        if not isinstance(t, Tensor) or (plain and name not in names):
            return t
        single = dim is not None and t.shape[dim] == 1 and name not in ("q", "sinks")
        return part(t, None if single else dim)

    return {
        name: type(value)(*(convert(name, t) for t in value)) if name == "plan" else convert(name, value)
        for name, value in arguments.items()
    }


def call(op: str, arguments: dict[str, Any]) -> Any:
    """Call the op, which must not communicate."""
    with CommDebugMode() as communication, torch.no_grad():
        result = getattr(torch.ops.attn, op)(**arguments)
    assert not communication.get_total_counts(), communication.get_comm_counts()
    return result


def whole(t: Any, axis: Axis | None) -> Tensor:
    """An output, which must be a DTensor that is sharded along ``axis``."""
    assert isinstance(t, DTensor)
    expected = Shard(axis.output) if axis and t.dim() > axis.output else Replicate()
    assert t.placements == (expected,), t.placements
    if t.dtype.itemsize > 1 or not t.is_floating_point():
        return t.full_tensor()
    bits = DTensor.from_local(t.to_local().view(torch.uint8), mesh(), t.placements)  # gloo has no FP8
    return bits.full_tensor().view(t.dtype)


def to_device(arguments: dict[str, Any]) -> dict[str, Any]:
    return pytree.tree_map_only(Tensor, lambda t: t.to(DEVICE), arguments)


HEADS = {2: ((4, 2), (8, 2), (4, 4), (4, 1)), 4: ((4, 4), (16, 4), (8, 8), (8, 1))}
"""Query and KV heads, by the number of ranks: groups of one, of several, and multi-query."""
