"""The architectures of GPT-2 and of Llama's family."""
