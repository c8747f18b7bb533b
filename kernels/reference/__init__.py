"""Plain PyTorch, CPU and CUDA: the executable specification, and the body of CPU artifacts.

Every function is traceable: no data-dependent shape, no ``.item()``, no loop over requests. Work is
proportional to a plan's capacity, not to the lengths it holds.
"""

from .attention import batch_decode, batch_prefill, ragged_prefill, single_prefill
from .merge import merge_state, merge_states
from .page import append_kv
from .plan import plan_decode, plan_prefill

__all__ = [
    "append_kv",
    "batch_decode",
    "batch_prefill",
    "merge_state",
    "merge_states",
    "plan_decode",
    "plan_prefill",
    "ragged_prefill",
    "single_prefill",
]
