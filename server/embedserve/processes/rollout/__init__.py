"""Rollout of model versions: one desired state, and processes that reconcile with it."""
