"""Minimum cuts: what to hold and what to compute again, at prices per byte."""
