"""`tercet bench`: Tercet, its ceiling and its baselines measured in one run and reported as ratios.

Drives the engine, the gateway and transformers through their public interfaces; does not know how any of them is
made fast. Each contender lives in a process of its own (`harness.contender_process`), so that no thread pool, allocator
or interpreter lock is shared, and the contenders take turns (`harness.rounds`).
"""
