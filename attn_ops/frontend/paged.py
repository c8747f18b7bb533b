"""Wrappers over a paged KV cache, and the 0.1 interface's ``forward``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ops.frontend.arguments import attention_options
from attn_ops.frontend.base import Wrapper
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.engine_attributes import buffer
from attn_ops.frontend.kv_cache import PagedCache, paged
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.planned_batch import Batch
from attn_ops.frontend.scales import Scale, ScaleFactors
from attn_ops.plan.state import workspace_size


class PagedWrapper(Wrapper):
    """A wrapper whose calls attend to a paged KV cache."""

    _paged_kv_indptr_buf, _paged_kv_indices_buf = buffer("kv_indptr"), buffer("kv_indices")
    _paged_kv_last_page_len_buf = buffer("kv_last_page_len")

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Nothing to do: one kernel reads caches of any strides."""

    def _paged_call(
        self,
        where: str,
        q: Tensor,
        paged_kv_cache: PagedCache,
        output: OutputSpec,
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        kv_layout: str | None = None,
        **changes: Any,
    ) -> AttentionCall:
        return self._call(
            where,
            (q, *paged(where, paged_kv_cache, kv_layout or self._kv_layout)),
            output,
            ScaleFactors.of_tensors(q_scale, k_scale, v_scale),
            kv_layout=kv_layout,
            **changes,
        )

    def _workspace_size(self, where: str, batch: Batch) -> tuple[int, int]:
        """Bytes of float workspace that plan() of this batch needs, and bytes of its plan."""
        batch.check(where)
        batch, size, fixed = self._size(batch)
        plan = self._resizable.fit(batch.spec, size, fixed).planner.state
        return 4 * workspace_size(plan), 4 * sum(t.numel() for t in plan)


def forward_changes(
    where: str, *, logits_soft_cap: float | None = None, suffix: str = "", **given: Any
) -> dict[str, Any]:
    """The options that ``forward`` replaces in its call: the arguments that are not at their defaults.

    A soft cap of 0 replaces the planned one, since the default is None.
    """
    options = attention_options(where, logits_soft_cap=logits_soft_cap, suffix=suffix, **given)
    defaults = attention_options(where)
    changes = {
        name: value
        for name, value, default in zip(options._fields, options, defaults, strict=True)
        if value is not default and value != default
    }
    if logits_soft_cap is not None:
        changes["logits_soft_cap"] = options.logits_soft_cap
    return changes
