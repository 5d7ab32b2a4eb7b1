"""Rollout of model versions: one desired state, and processes that reconcile with it.

coordinator.py owns the desired state (served_name.py, for each name), version_manager.py reconciles
a process with it, and messages.py has what they exchange; agent.py connects them in a process.
store_watcher.py polls the store by version_resolver.py. delta_versions.py follows deltas,
shard_versions.py chooses the versions of a shard, and admin_service.py serves administrators.
"""
