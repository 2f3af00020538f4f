"""Tercet's workers on Ray Serve.

`app` builds a Serve application for one model. Its `Worker` replicas hold `workers.service`, and its `Ingress` replicas
speak the internal protocol for all of them, so that a gateway reaches the whole pool at one URL. docs/RAY.md.
"""
