"""The version number, in one place; read by the build and by `autopar --version`."""

__version__ = "0.1.0"
