"""What a state is made of: what a tensor is (``tensors``), how a state becomes tensors and a plan
(``walk``), and how a stored checkpoint gets into targets (``match``).
"""
