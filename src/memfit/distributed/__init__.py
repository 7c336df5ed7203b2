"""Models whose training step runs in several processes at once."""
