"""The GPT-2 architecture and its checkpoint loader."""
