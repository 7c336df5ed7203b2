"""Compiles blocks in several partitions, and runs each block of a model by the one that the plan chose."""
