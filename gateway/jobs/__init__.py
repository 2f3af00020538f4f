"""Jobs: requests whose results are kept by id for clients that cannot wait. Knows no HTTP server and no dialect."""
