"""What keeps Tercet running: the supervisor, reloads, and files for systemd, nginx and Grafana."""
