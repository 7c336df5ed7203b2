"""Compiled blocks: what the partitions of a block may save, and which partition each block of the model uses."""
