"""Compiled blocks: which partition each block of the model uses, and what leaves for the host."""
