"""The engine in Python, which is the specification, and what both engines share."""
