"""Runs Tercet: command line, supervisor, planning, benchmarks. No other package imports it."""
