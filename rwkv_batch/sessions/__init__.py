"""States with names: pool, tiers, leases and the store."""
