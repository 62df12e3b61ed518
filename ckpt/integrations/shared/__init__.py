"""What the integrations share: results of all ranks, steps that are loaded in part, warnings."""
