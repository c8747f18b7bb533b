"""Serving, compiling, exporting and packaging a Llama-architecture decoder: ``python -m attn_ops.demo``."""
