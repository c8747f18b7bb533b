"""Attention for LLM inference as first-class PyTorch ops.

``import attn_ops`` registers ``torch.ops.attn.*``. Make a planner, plan a batch, call the op::

    planner = attn_ops.DecodePlanner(max_batch, max_pages, page_size=16, num_qo_heads=32, num_kv_heads=8, head_dim=128)
    plan = planner.plan(kv_indptr, kv_indices, kv_last_page_len)
    out, lse = torch.ops.attn.batch_decode(q, k_cache, v_cache, plan, planner.workspace)

On top of the ops lie FlashInfer's names, in its modules and here (:mod:`attn_ops.exports`)::

    import attn_ops as flashinfer
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, kv_layout="NHD")

and FlashAttention's functions in :mod:`attn_ops.flash_attn`::

    from attn_ops.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
"""

import importlib
from typing import Any

from attn_ops import errors
from attn_ops.collect_env import collect_env
from attn_ops.exports import EXPORTS, HOMES
from attn_ops.ops import register
from attn_ops.ops.register import explain
from attn_ops.plan.state import DecodePlan, PrefillPlan
from attn_ops.planner import DecodePlanner, PrefillPlanner
from attn_ops.sparse_planner import BlockSparsePlanner, VariableBlockSparsePlanner
from attn_ops.version import __version__

register.register()

_LAZY = {**HOMES, "export_package": "packaging"}
"""The module of each name that is imported when the name is first used."""

_MODULES = (*EXPORTS, "distributed", "flash_attn")
"""Modules that are imported when they are first used."""

__all__ = [
    "BlockSparsePlanner",
    "DecodePlan",
    "DecodePlanner",
    "PrefillPlan",
    "PrefillPlanner",
    "VariableBlockSparsePlanner",
    "__version__",
    "collect_env",
    "errors",
    "explain",
    "export_package",
    *HOMES,
]


def __getattr__(name: str) -> Any:
    """Modules, FlashInfer's names and ``export_package``, imported when first used."""
    if name in _LAZY:
        value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_MODULES})
