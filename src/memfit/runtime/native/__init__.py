"""The engine in C++: its sources, and how they are built and loaded."""
