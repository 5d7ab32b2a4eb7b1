"""Who asks, and what they may: names with tokens or certificates, their models and their limits."""
