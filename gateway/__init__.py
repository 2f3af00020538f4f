"""The gateway: accepts requests, fans each out to workers, merges the completions. Never imports torch, transformers
or workers.

Imports go one way: `app → server, api, middleware → generation, jobs → pool → metrics → shared`.
"""
