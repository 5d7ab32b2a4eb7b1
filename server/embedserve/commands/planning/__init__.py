"""`embedserve plan`: shows sharding plans, balances them by measured reads, and sizes pods."""
