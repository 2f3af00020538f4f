"""Shared by the gateway and the workers: settings, slot plan, internal protocol, errors, telemetry."""
