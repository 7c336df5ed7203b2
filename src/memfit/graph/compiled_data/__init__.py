"""Compiled blocks as data, and in files."""
