"""`tercet lsp`: a language server that brings suggestions to any editor that speaks the Language Server Protocol."""
