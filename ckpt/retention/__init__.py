"""What a tier keeps: the inventory of a tier, the retention policy, pruning and quotas."""
