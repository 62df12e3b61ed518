"""The version of ckpt, in a module that any other module can import without an import cycle."""

__version__ = "0.1.0"
