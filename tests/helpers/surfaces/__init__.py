"""The surfaces of all public callables of FlashInfer's API, and the tests of those that have none.

``base`` says what a surface is; ``functions``, ``wrappers`` and ``sparse`` are the tables.
"""

from __future__ import annotations

from helpers.surfaces.functions import FUNCTIONS
from helpers.surfaces.sparse import SPARSE
from helpers.surfaces.wrappers import WRAPPERS

SURFACES = [*FUNCTIONS, *WRAPPERS, *SPARSE]

ELSEWHERE = {
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": "test_decode.test_cuda_graph_mode_fills_the_callers_buffers",
    "append_paged_kv_cache": "test_page",
    "append_paged_mla_kv_cache": "test_page",
    "convert_bsr_mask_layout": "test_sparse.test_masks_of_blocks_are_ordered_by_row",
    "fast_decode_plan": "test_decode.test_fast_decode_plan; its arguments are those of plan()",
    "get_batch_indices_positions": "test_page",
    "get_seq_lens": "test_page",
    "merge_state": "test_cascade",
    "merge_state_in_place": "test_cascade",
    "merge_states": "test_cascade",
    "packbits": "test_page",
    "segment_packbits": "test_page",
    "single_prefill_with_kv_cache_return_lse": "test_prefill; its arguments are those of single_prefill_with_kv_cache",
    "variable_length_merge_states": "test_cascade",
}
"""Functions of a few tensors, all of which are inputs: where they are tested."""
