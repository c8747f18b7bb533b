"""A Llama-architecture decoder: served, compiled, exported and packaged. Run ``python -m attn_ops.demo``."""
