"""HTTP resources: one module per endpoint or dialect, and what they share (schema, SSE, error responses)."""
