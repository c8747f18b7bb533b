"""Eager calls on CUDA by prepared calls, and what is started ahead of the first."""
