"""Attributes of FlashInfer's wrappers that engines read, under their names there, and buffers that they fill."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ops.frontend.cuda_graph import GraphBuffers
from attn_ops.frontend.planned_batch import PlannedBatch
from attn_ops.ops.options import OP_OPTIONS


def _planned_option(name: str) -> property:
    """An option as planned."""

    def value(self: EngineAttributes) -> Any:
        p = self._planned
        if p is None or name not in (*OP_OPTIONS[p.op], "causal"):
            raise AttributeError(f"{self._name}: there is no plan that says {name}")
        return getattr(p.options, name)

    def refuse_to_set(self: EngineAttributes, _: Any) -> None:
        raise AttributeError(f"{self._name}: {name} is that of the last plan, and cannot be set; give it to plan()")

    return property(value, refuse_to_set)


def buffer(key: str) -> property:
    """A buffer of CUDA-graph mode."""

    def value(self: EngineAttributes) -> Tensor:
        if self._graph is None or key not in self._graph.buffers:
            raise AttributeError(f"{self._name}: there is no buffer for {key}; they are those of CUDA-graph mode")
        return self._graph.buffers[key][1]

    def refuse_to_set(self: EngineAttributes, _: Any) -> None:
        raise AttributeError(
            f"{self._name}: the buffer for {key} is the constructor's, and cannot be set; make a wrapper in CUDA-graph "
            "mode, with that buffer"
        )

    return property(value, refuse_to_set)


class EngineAttributes:
    """What engines read of a wrapper's plan, workspace and buffers, in addition to its public methods."""

    _name: str
    _workspace: Tensor | None
    _graph: GraphBuffers | None
    _planned: PlannedBatch | None

    _causal, _sm_scale = _planned_option("causal"), _planned_option("sm_scale")
    _window_left, _logits_soft_cap = _planned_option("window_left"), _planned_option("logits_soft_cap")
    _qo_indptr_buf = buffer("qo_indptr")

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph is not None

    @property
    def _fixed_batch_size(self) -> int:
        """Requests of every plan in CUDA-graph mode, else 0."""
        return 0 if self._graph is None else self._graph.batch

    @property
    def _plan_info(self) -> list[Tensor] | None:
        """The tensors of the plan, None before the first."""
        return None if self._planned is None else list(self._planned.plan)

    @property
    def _custom_mask_buf(self) -> Tensor | None:
        """The packed mask of the last plan and memory behind it, or None; in CUDA-graph mode the caller's buffer."""
        if self._graph is not None:
            return self._graph.buffers["mask"][1] if "mask" in self._graph.buffers else None
        return None if self._planned is None else self._planned.options.mask

    @_custom_mask_buf.setter
    def _custom_mask_buf(self, _: Any) -> None:
        raise AttributeError(f"{self._name}: _custom_mask_buf cannot be set; give the mask to plan()")

    @property
    def _cached_module(self) -> Any:
        raise AttributeError(
            f"{self._name}: there is no compiled module behind a wrapper; call plan() in place of a planning function "
            "that calls FlashInfer's module"
        )

    @property
    def _float_workspace_buffer(self) -> Tensor | None:
        """The caller's workspace."""
        return self._workspace

    def end_forward(self) -> None:
        """Nothing to do: a plan needs no end. Kept for callers of FlashInfer's 0.1 interface."""
