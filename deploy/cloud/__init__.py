"""How Tercet runs in clouds and clusters: AWS, Kubernetes, Ray."""
