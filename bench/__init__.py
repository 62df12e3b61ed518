"""Measures what a checkpoint costs: ``python -m bench all``; see README.md."""
