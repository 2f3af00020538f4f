"""Falcon middleware for all routes: request log, origins, body limits. Their order is set in `gateway.app`."""
