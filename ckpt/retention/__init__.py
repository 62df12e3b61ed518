"""Retention: decide which steps a tier keeps, and remove the other steps."""
