"""Measures times, memory and rates of a device and a step."""
