"""Pure values: boxes, dtypes, keys, checksums, plain values, the manifest and its bytes.

No I/O, no torch.
"""
