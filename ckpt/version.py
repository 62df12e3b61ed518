"""The version of the package, for the parts that do not import the facade."""

__version__ = "0.1.0"
