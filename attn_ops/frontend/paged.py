"""Wrappers over a paged KV cache: reading the cache, and the options that ``forward`` of 0.1 takes per call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ops.frontend.arguments import attention_options
from attn_ops.frontend.base import Wrapper, buffer, measured
from attn_ops.frontend.kv_cache import PagedCache, paged
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import Scale
from attn_ops.plan.page_table import PageTable
from attn_ops.plan.resizable import PlanSpec
from attn_ops.plan.state import workspace_size


class PagedWrapper(Wrapper):
    _paged_kv_indptr_buf, _paged_kv_indices_buf = buffer("kv_indptr"), buffer("kv_indices")
    _paged_kv_last_page_len_buf = buffer("kv_last_page_len")

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Nothing to do: one kernel reads caches of any strides."""

    def _attend(
        self,
        where: str,
        q: Tensor,
        paged_kv_cache: PagedCache,
        output_spec: OutputSpec,
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        sinks: Any = None,
        **changes: Any,
    ) -> Any:
        return self._run(
            where,
            (q, *paged(where, paged_kv_cache, changes.get("kv_layout") or self._kv_layout)),
            output_spec,
            logit_scales={"q_scale": q_scale, "k_scale": k_scale},
            value_scales={"v_scale": v_scale},
            sinks=sinks,
            **changes,
        )

    def _sizes(self, tables: PageTable, shape: PlanSpec) -> tuple[int, int]:
        """Bytes of float workspace that the batch needs, and bytes of integers that its plan holds by itself."""
        tables, extent = measured(tables, shape)
        fixed = None if self._graph is None else self._graph.room(shape.page_size, extent)
        plan = self._growing.fit(shape, extent, fixed).planner.state
        return 4 * workspace_size(plan), 4 * sum(t.numel() for t in plan)


def forward_changes(
    where: str,
    *,
    causal: bool = False,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
) -> dict[str, Any]:
    """What ``forward`` changes for its call: each option that departs from its default; the others stay as planned.

    A soft cap of 0 does, as it is not None.
    """
    given = attention_options(
        where,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
    )
    default = attention_options(where)
    changes = {name: None if value == default[name] else value for name, value in given.items()}
    if logits_soft_cap is not None:
        changes["logits_soft_cap"] = given["logits_soft_cap"]
    return {**changes, "causal": True} if causal else changes
