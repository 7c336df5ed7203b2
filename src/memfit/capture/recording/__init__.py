"""Records the ops, values and saves of a step."""
