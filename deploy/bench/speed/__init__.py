"""Benchmarks of latency and throughput."""
