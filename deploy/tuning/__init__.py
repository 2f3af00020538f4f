"""Which plan to serve: the devices, what fits into their memory, and what serves a load best."""
