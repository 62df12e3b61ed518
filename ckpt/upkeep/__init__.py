"""Upkeep: what happens to a step after it is on its nearest durable tier."""
