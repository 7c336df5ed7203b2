"""Pointwise ops that are replayed in one kernel."""
