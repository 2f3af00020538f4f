"""The engine: token ids in, sampled tokens out.

Knows a model and a device. Does not know HTTP, the environment, and other workers.
"""
