"""Plug-ins for editors, over the npm package `tercet-client`. They are built from a checkout and are not installed."""
