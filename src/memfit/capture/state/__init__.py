"""Restores everything that a measured step changes."""
