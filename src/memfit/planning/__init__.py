"""Everything that decides, on numbers only. No torch."""
