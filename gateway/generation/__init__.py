"""From a `GenerationSpec` to completions or suggestions: fan-out, sessions, selection, trimming. Knows no dialect."""
