"""Block-sparse attention: the blocks that a matrix selects, and no other key.

FlashInfer's names and arguments (docs/guide/block_sparse.md). LSE is base 2.
"""

from attn_ops.frontend.block_sparse import BlockSparseAttentionWrapper, convert_bsr_mask_layout
from attn_ops.frontend.variable_block_sparse import VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper", "convert_bsr_mask_layout"]
