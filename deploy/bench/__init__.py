"""`tercet bench`: ceiling, baselines and ours, measured in one run and printed as ratios.

Knows how to time what a user waits for. Refuses to know how any of it is made fast: the engine, the gateway and
transformers are driven through what they offer everybody. Each contender lives in a process of its own (`child`),
so that no thread pool, allocator or interpreter lock of one is in another's way, and they take turns (`rounds`).
"""
