"""The simulator: the memory and the time of one step under a plan."""
