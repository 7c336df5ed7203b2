"""Turns data into tables and pages. No torch."""
