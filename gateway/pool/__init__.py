"""The worker pool as the gateway sees it: admission, placement, slot states, and the HTTP client of a slot."""
