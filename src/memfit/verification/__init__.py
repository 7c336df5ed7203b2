"""Tries a plan on a model and compares with the plain step: gradients, peak, time."""
