"""From a `GenerationSpec` to suggestions: fan-out, sessions, selection, trimming. Knows no HTTP and no dialect."""
