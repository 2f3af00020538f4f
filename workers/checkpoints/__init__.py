"""Finding, fetching and checking checkpoints."""
