"""The HTTP server around gunicorn: connections, request heads, error responses, early refusals.

Only the early refusals know a route; nothing here knows a dialect.
"""
