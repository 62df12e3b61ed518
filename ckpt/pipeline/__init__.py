"""Threads and bytes: the package's threads, retries, and moving images to and from a tier.

Torch-free.
"""
