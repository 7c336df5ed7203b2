"""Measures one real training step and describes it as data."""
