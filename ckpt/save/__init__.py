"""The background half of a save: an image that lands in host memory becomes a checkpoint on every
tier.
"""
