"""Agreement between ranks without collectives: coordinators, exchanges and the commit protocol.

This package does not import torch.
"""
