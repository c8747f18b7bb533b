"""CUDA C++ kernels for Hopper, compiled from the sources in this folder."""

from attn_ops.kernels.cuda.merge_states import merge_state, merge_state_in_place, merge_states
