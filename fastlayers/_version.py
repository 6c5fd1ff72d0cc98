"""The version of fastlayers, read by the build without importing torch."""

__version__ = "0.1.0"
