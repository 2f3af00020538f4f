"""Measurement of a server under load: the server, its clients, prompts and prose, rounds, and the result document.

Used by `tercet tune`, `tercet calibrate` and the developers' benchmarks; knows none of them.
"""
