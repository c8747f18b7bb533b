"""Repeated eager calls: prepared calls on CUDA, checked calls and bound calls on the CPU. See docs/contributing."""
