"""Value types and pure functions: boxes, dtypes, keys, checksums, plain values, and the manifest
with its encoding to bytes.

No module of this package does I/O or imports torch.
"""
