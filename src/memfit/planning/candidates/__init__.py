"""Proposers of plans, and the pool of candidates that they add to."""
