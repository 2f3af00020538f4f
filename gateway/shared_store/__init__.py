"""What several gateways share in Redis: the connection, and every script that Redis runs."""
