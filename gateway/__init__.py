"""Accepts, fans out, merges. Never imports torch, transformers or workers."""
