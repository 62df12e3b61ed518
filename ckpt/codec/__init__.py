"""Codecs, which encode the bytes of a chunk into fewer bytes and decode them again."""
