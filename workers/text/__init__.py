"""Text processing: tokenizer, incremental detokenizer, stop strings, prompt window, token healing."""
