"""One module per resource or dialect: parses a request into a `GenerationSpec`, renders what comes of it."""
