"""The conversion of a state to named leaves and back, and the coordinator over the job's TCPStore.

Only this package, ``staging``, ``exchange``, ``integrations`` and the facade ``ckpt.manager``
import torch.
"""
