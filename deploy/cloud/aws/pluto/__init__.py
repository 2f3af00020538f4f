"""The two Lambda functions of `pluto.yaml`. Each is one file, which knows nothing of Tercet but its HTTP API."""
