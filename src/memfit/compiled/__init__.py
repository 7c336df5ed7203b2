"""Measures a training step whose repeated blocks are compiled, with each partition of the blocks."""
