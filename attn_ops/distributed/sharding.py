"""DTensors as arguments of the ops: ``torch.ops.attn.*`` on sharded tensors, each rank on its own heads.

:func:`register` gives every op a rule for DTensors, all of them :func:`dispatch`: it checks the placements against
:data:`~attn_ops.distributed.sharding_table.SHARDED_DIMS`, calls the op on the local tensors and wraps the outputs. A
rule never communicates. Where the placements do not fit, it raises the same error on every rank, since it reads nothing
but placements and global sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from attn_ops.distributed.sharding_plan import local_plan
from attn_ops.distributed.sharding_table import KV_ARGUMENTS, SHARDED_DIMS, Axis
from attn_ops.errors import PlacementError, UnsupportedError, fail
from attn_ops.ops.checks.checker import OpChecker
from attn_ops.ops.register import LIBRARY
from attn_ops.ops.schemas import NAMESPACE, SCHEMAS
from attn_ops.plan.plan_checks import check_head_shards
from attn_ops.plan.state import DecodePlan, PrefillPlan

Arguments = dict[str, Any]

PLANS: dict[str, type[DecodePlan] | type[PrefillPlan]] = {"batch_decode": DecodePlan}
"""The plan of an op where it is not a :class:`PrefillPlan`."""


def register() -> None:
    """Register the rule of every op, once, on import of :mod:`attn_ops.distributed`."""
    for op in SCHEMAS:
        torch.library.register_torch_dispatch(f"{NAMESPACE}::{op}", DTensor, dispatch, lib=LIBRARY)


def dispatch(_cls: Any, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: Arguments | None = None) -> Any:
    """Run the op ``func`` on DTensors: check, call it on the local tensors, wrap its outputs."""
    op = func._schema.name.removeprefix(f"{NAMESPACE}::")
    names = (argument.name for argument in func._schema.arguments)
    arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
    OpChecker(op).no_grad(**_tensors(arguments))
    with torch.no_grad():  # to_local() then returns the local tensor itself
        call = _ShardedCall(op, arguments)
        return call.wrap(func(**{name: call.local(name, value) for name, value in arguments.items()}))


class _ShardedCall:
    """A call of an op with DTensors among its arguments, checked.

    Attributes:
        tensors: its tensors by name.
        mesh: the mesh of all its DTensors.
        lead: the argument that decides how the op is sharded, empty if it cannot be sharded.
        axes: how the op is sharded over each mesh dimension, None if it is replicated.
        dims: the sharded dimensions of its arguments, by the name of the axis.
        head_shards: ranks that the heads are divided over.
    """

    def __init__(self, op: str, arguments: Arguments) -> None:
        self.op, self.arguments, self.tensors = op, arguments, _tensors(arguments)
        kv_layout = arguments.get("kv_layout", "NHD")
        OpChecker(op).layout(kv_layout)
        self.dims = {axis.name: axis.of_layout(kv_layout) for axis in SHARDED_DIMS[op]}
        self.lead = next(iter(self.dims["heads"])) if self.dims else ""
        self.mesh = self._mesh()
        self.axes = self._axes()
        self._check_placements()
        heads = (self.mesh.size(i) for i, axis in enumerate(self.axes) if axis and axis.name == "heads")
        self.head_shards = math.prod(heads)
        if self.head_shards > 1:
            self._check_heads()

    def local(self, name: str, value: Any) -> Any:
        """The part of an argument that this rank computes with."""
        if name != "plan":
            return _to_local(value)
        fields = [_to_local(t) for t in value]
        if self.head_shards == 1:
            return fields
        return local_plan(PLANS.get(self.op, PrefillPlan)(*fields), self.head_shards)

    def wrap(self, result: Any) -> Any:
        """The outputs as DTensors."""
        if result is None:
            return None
        return self._wrap(result) if isinstance(result, Tensor) else tuple(map(self._wrap, result))

    def _wrap(self, t: Tensor) -> DTensor:
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        shape = list(t.shape)
        for i, axis in enumerate(self.axes):
            if axis is not None and axis.output < t.dim():  # an LSE that was not requested has fewer dimensions
                placements[i] = Shard(axis.output)
                shape[axis.output] = self.tensors[self.lead].shape[self.dims[axis.name][self.lead]]
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return DTensor.from_local(t, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def _mesh(self) -> DeviceMesh:
        meshes = {name: t.device_mesh for name, t in self.tensors.items() if isinstance(t, DTensor)}
        first, mesh = next(iter(meshes.items()))
        for name, other in meshes.items():
            if other != mesh:
                what = f"{first} and {name} are on different meshes"
                fail(PlacementError, self.op, what, "one mesh", "redistribute one of them")
        if mesh.get_coordinate() is None:
            what, expected = "this rank is not in the mesh of the DTensors", "a rank of the mesh"
            fail(PlacementError, self.op, what, expected, "call the op only on the ranks of the mesh")
        return mesh

    def _axes(self) -> list[Axis | None]:
        if not self.lead:
            return [None] * self.mesh.ndim
        found: dict[Placement, Axis | None] = {
            Shard(self.dims[axis.name][self.lead]): axis for axis in SHARDED_DIMS[self.op]
        }
        found[Replicate()] = None
        for i, placement in enumerate(self._placements(self.lead)):
            if placement not in found:
                self._fail_placement(self.lead, i, " or ".join(map(str, found)))
        return [found[placement] for placement in self._placements(self.lead)]

    def _placements(self, name: str) -> Sequence[Placement]:
        """The placements of a DTensor; a plain tensor is the same on every rank."""
        t = self.tensors[name]
        return t.placements if isinstance(t, DTensor) else [Replicate()] * self.mesh.ndim

    def _check_placements(self) -> None:
        """Raise unless every tensor is sharded like ``lead``."""
        for name in self.tensors:
            for i, (placement, axis) in enumerate(zip(self._placements(name), self.axes, strict=True)):
                dims = self.dims[axis.name] if axis else {}
                replicated = name not in dims or self._is_single_kv_head(name, dims[name])
                expected = Replicate() if replicated else Shard(dims[name])
                if placement != expected and self.mesh.size(i) > 1:
                    since = f", since {self._describe(self.lead, i)}" if self.lead else ""
                    self._fail_placement(name, i, f"{expected}{since}")

    def _is_single_kv_head(self, name: str, dim: int) -> bool:
        """Multi-query attention: every rank has the one KV head."""
        shape = self.tensors[name].shape
        return name in KV_ARGUMENTS.get(self.op, ()) and dim < len(shape) and shape[dim] == 1

    def _fail_placement(self, name: str, mesh_dim: int, expected: str) -> NoReturn:
        names = self.mesh.mesh_dim_names
        what = f"{self._describe(name, mesh_dim)} on mesh dimension {repr(names[mesh_dim]) if names else mesh_dim}"
        fail(PlacementError, self.op, what, expected, "use distribute_tensor, DTensor.from_local or redistribute")

    def _describe(self, name: str, mesh_dim: int) -> str:
        is_plain = not isinstance(self.tensors[name], DTensor)
        return f"{name} is {'a plain tensor' if is_plain else self._placements(name)[mesh_dim]}"

    def _check_heads(self) -> None:
        """Raise unless ranks divide the heads evenly, the plan has all heads, and no option depends on their order."""
        dims = {name: dim for name, dim in self.dims["heads"].items() if name in self.tensors}
        sizes = {name: self.tensors[name].shape[dim] for name, dim in dims.items() if dim < self.tensors[name].dim()}
        divided = {name: size for name, size in sizes.items() if not self._is_single_kv_head(name, dims[name])}
        check_head_shards(self.op, divided, self.head_shards)
        if self.arguments.get("pos_encoding") == "ALIBI":
            what, fix = "pos_encoding is ALIBI and the heads are sharded", "replicate the heads, or drop pos_encoding"
            expected = "NONE or ROPE_LLAMA, since a slope depends on the head's number among all"
            fail(UnsupportedError, self.op, what, expected, fix)
        if "plan" in self.arguments:
            self._check_plan(sizes)

    def _check_plan(self, heads: dict[str, int]) -> None:
        checker = OpChecker(self.op)
        fields = [_to_local(t) for t in self.arguments["plan"]]
        planned = {"num_qo_heads": heads.get(self.lead), "num_kv_heads": heads.get("k_cache", heads.get("k"))}
        checker.planned_for(
            checker.plan(fields, PLANS.get(self.op, PrefillPlan), None),
            **{name: int(count) for name, count in planned.items() if count is not None},
        )


def _tensors(arguments: Arguments) -> dict[str, Tensor]:
    """The tensors of a call by name, the fields of a plan as ``plan.0`` and so on."""
    found = {}
    for name, value in arguments.items():
        listed = {f"{name}.{i}": t for i, t in enumerate(value)} if isinstance(value, list | tuple) else {name: value}
        found.update({key: t for key, t in listed.items() if isinstance(t, Tensor)})
    return found


def _to_local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
