"""The worker pool as the gateway sees it: admission, placement, state, and the HTTP client."""
