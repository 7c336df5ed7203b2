"""Plans that offload values to the host."""
