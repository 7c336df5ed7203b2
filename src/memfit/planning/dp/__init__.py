"""A dynamic program over partial plans: smallest peaks, fast plans, and proofs of both."""
