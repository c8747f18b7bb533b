"""FlashInfer's modules and names in this package. ``attn_ops`` imports a module when one of its names is first used."""

EXPORTS: dict[str, tuple[str, ...]] = {
    "attention": ("BatchAttention", "BatchAttentionWithAttentionSinkWrapper"),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
        "variable_length_merge_states",
    ),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "cudnn_batch_decode_with_kv_cache",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
    ),
    "mla": (
        "BatchMLAPagedAttentionWrapper",
        "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache_mla",
    ),
    "page": ("append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"),
    "pod": ("BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "cudnn_batch_prefill_with_kv_cache",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_ragged_attention_deepseek",
    ),
    "quantization": ("packbits", "segment_packbits"),
    "sparse": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"),
    "xqa": ("xqa", "xqa_mla"),
}

HOMES: dict[str, str] = {name: module for module, names in EXPORTS.items() for name in names}
"""The module of each name."""
