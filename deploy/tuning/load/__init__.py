"""Measurement of a server under load: the server, its clients and prompts, rounds, and the result document.

Used by `tercet tune` and the developers' benchmarks; knows none of them.
"""
