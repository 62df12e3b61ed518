"""Planned stops: after a signal or a request on any rank, all ranks stop after the same step."""
