"""Measures what a checkpoint costs: ``python -m bench save``."""
