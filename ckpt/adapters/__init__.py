"""The conversion of a state to named leaves and back, and the coordinator over the job's TCPStore.

Of all packages, only this one, ``staging``, ``exchange`` and ``integrations`` import torch, and so
does the facade.
"""
