"""What the masters of both pools do: the start and its checks, the run directory, workers and their slots."""
