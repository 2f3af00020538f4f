"""Benchmarks of what the suggestions are worth."""
