"""The C source of the compiled kernels, and their compilation."""
