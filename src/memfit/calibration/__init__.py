"""Completes a captured profile by trial runs with plans."""
