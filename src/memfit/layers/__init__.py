"""The layer grain: profiles of layers, strategies that choose which to recompute, and the plans they give. No torch."""
