"""`tercet tune`: measures on this machine what cannot be decided in advance, and stores it for the workers."""
