"""Where requests wait: for a thread of their class, and for slots."""
