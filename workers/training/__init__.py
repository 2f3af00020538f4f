"""The program that trains the embedded checkpoint. Nothing that serves imports it."""
