"""The decode engine of one entry: token ids in, token ids out.

Knows a model and a device. Refuses to know HTTP, the environment, and any other entry.
"""
