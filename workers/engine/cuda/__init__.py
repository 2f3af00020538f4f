"""The CUDA backend of the engine."""
