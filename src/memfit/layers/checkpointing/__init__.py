"""Running a chain of layers with few activations in memory, in any array library."""
