"""The CPU backend of the engine."""
