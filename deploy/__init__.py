"""How Tercet runs: command line, supervisor, planning. Nothing imports it."""
