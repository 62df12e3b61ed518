"""Planned stops: a signal on any rank lets all ranks stop after the same step."""
