"""Triton kernels of a decode step: compiled without a C compiler, launched through the CUDA driver.

Importing this package imports neither Triton nor cuda-bindings, which a machine without a GPU does not need.
"""
