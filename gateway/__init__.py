"""The gateway: accepts requests, fans each out to workers, merges the completions. Never imports torch, transformers
or workers.

Imports go one way: `app → api, middleware → generation → pool → metrics → shared`.
"""
