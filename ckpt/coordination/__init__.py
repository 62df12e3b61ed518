"""Agreement between ranks without collectives: coordinators, exchanges and the commit protocol.

Only ``torch_store`` and ``join`` import torch.
"""
