"""memfit inside training frameworks. Each module needs its framework, and ``import memfit`` imports none of them."""
