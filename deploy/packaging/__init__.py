"""What Tercet is published as: container, wheel, documentation site, bundles of other code."""
