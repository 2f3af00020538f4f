"""What all benchmarks share: options, processes, the server under test, the clients, the result document."""
