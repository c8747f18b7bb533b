"""Attention for LLM inference as first-class PyTorch ops.

``import attn_ops`` registers ``torch.ops.attn.*``. Make a planner, plan a batch, call the op::

    planner = attn_ops.DecodePlanner(max_batch, max_pages, page_size=16, num_qo_heads=32, num_kv_heads=8, head_dim=128)
    plan = planner.plan(kv_indptr, kv_indices, kv_last_page_len)
    out, lse = torch.ops.attn.batch_decode(q, k_cache, v_cache, plan, planner.workspace)
"""

from . import dispatch, errors
from .dispatch import explain
from .plan import DecodePlan, PrefillPlan
from .planner import DecodePlanner, PrefillPlanner
from .version import __version__

dispatch.register()

__all__ = ["DecodePlan", "DecodePlanner", "PrefillPlan", "PrefillPlanner", "__version__", "errors", "explain"]
