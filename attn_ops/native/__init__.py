"""Compiled kernels as images: their tables, the launcher in C++, and their place in AOTInductor packages."""
