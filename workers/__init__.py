"""The worker pool: processes that hold models. Imported by nothing on the gateway's side."""
