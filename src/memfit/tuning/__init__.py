"""The batch size that trains fastest within a budget."""
