"""Convert a state to named leaves and back, and coordinate the ranks over the job's TCPStore.

Only this package, ``staging``, ``exchange``, ``integrations`` and the facade ``ckpt.manager``
import torch.
"""
