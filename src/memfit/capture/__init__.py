"""Records and measures one plain training step. Never imports planning."""
