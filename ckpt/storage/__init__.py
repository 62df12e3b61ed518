"""Where checkpoints lie: the contract of a backend, the table that finds one for a URL, and tiers."""
