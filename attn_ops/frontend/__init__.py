"""What the public modules share: wrappers, one-shot calls, arguments, caches, scales, masks, output buffers.

``attn_ops.decode``, ``prefill``, ``attention``, ``mla``, ``xqa``, ``cascade``, ``pod`` and ``flash_attn`` have the
signatures, and this package turns their arguments into calls of ``torch.ops.attn.*``. It contains no kernels.
"""
