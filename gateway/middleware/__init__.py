"""Falcon middleware for all routes: request log, origins, keys, body limits. Their order is set in `gateway.app`."""
