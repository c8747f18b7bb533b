"""Eager calls on CUDA: a launch cache in each op, and prepared methods that bypass Python and the dispatcher."""
