"""Retention: the inventory of a tier, the policy, pruning, eviction, quotas and claims."""
