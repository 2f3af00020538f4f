"""The worker pool: processes that hold models. The gateway never imports it."""
