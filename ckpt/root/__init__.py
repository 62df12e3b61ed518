"""Who owns a root: the owner, what its claim allows, claim markers, pins and leases."""
