"""Kubernetes manifests (kustomize), and what generates one of them. docs/KUBERNETES.md has the commands."""
