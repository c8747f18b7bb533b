"""Eager calls on CUDA: a launch cache in each op, and prepared calls that bypass Python and the dispatcher."""
