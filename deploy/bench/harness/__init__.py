"""What every benchmark shares: servers, clients, rounds, reports and plots."""
