"""``python -m benchmarks --help``: what is measured, how, and against which goals."""
