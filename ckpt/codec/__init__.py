"""Codecs: how the bytes of a chunk become fewer bytes, and back."""
