"""The commands of `tercet` that have no package of their own, one module each."""
