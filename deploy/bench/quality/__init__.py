"""Benchmarks of what the suggestions are worth to a writer."""
