"""Triton: the general GPU backend, and what Inductor inlines into CUDA graphs and packages."""

from .decode import batch_decode
from .merge import merge_state, merge_states
from .page import append_kv
from .plan_decode import plan_decode
from .plan_prefill import plan_prefill

__all__ = ["append_kv", "batch_decode", "merge_state", "merge_states", "plan_decode", "plan_prefill"]
