"""Compares the forward passes of a planned model with what its plan was made for."""
