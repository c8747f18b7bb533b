"""Benchmarks of the ops, compared with the fastest peers. ``python -m benchmarks --help`` lists them."""
