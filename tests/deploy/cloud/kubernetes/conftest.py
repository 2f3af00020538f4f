"""The gateway's app in this process, for its routes, metrics and OpenAPI document."""

from tests.gateway.conftest import hangups, make_gateway

__all__ = ["hangups", "make_gateway"]
