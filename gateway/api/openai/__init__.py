"""OpenAI's completions API."""
