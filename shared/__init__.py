"""What the gateway and the workers agree on: settings, slot plan, wire schemas, errors, telemetry."""
