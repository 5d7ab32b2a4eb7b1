"""Access control: callers with tokens or certificates, their models and their limits."""
