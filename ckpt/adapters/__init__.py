"""State -> named leaves, and back; and the job's TCPStore as coordinator.

The only rooms beside staging and the facade that import torch.
"""
