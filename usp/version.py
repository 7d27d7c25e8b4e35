"""The version of the library, which ranks compare."""

__version__ = "0.1.0"
