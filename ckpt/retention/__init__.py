"""Retention: which steps of a tier are kept, and the removal of the others."""
