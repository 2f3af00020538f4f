"""The HTTP server in a process of gunicorn: connections, requests, responses, early refusals.

Only the early refusals know a route; nothing here knows a dialect.
"""
