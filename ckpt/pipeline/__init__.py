"""The threads of ckpt, the retries of requests, and the transfer of images to and from a tier.

This package does not import torch.
"""
