"""The checkpoint that ships, its card, and the program that trains it. Servers read files here, no code."""
