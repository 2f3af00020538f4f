"""Turns a `GenerationSpec` into completions or suggestions: fan-out, sessions, selection, trimming. Knows no
dialect."""
