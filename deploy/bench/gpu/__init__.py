"""`tercet bench gpu`: all measurements of a machine with a GPU, in one run that may be cut off at any time."""
