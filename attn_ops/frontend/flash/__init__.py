"""What the functions of :mod:`attn_ops.flash_attn` share: arguments, batches, plans and rotary embeddings."""
