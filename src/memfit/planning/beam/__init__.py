"""Beam search over partial plans, for plans of low peaks."""
