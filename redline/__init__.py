"""Redline serves Kimi K2-class models at the speed that the hardware allows. See README.md and ARCHITECTURE.md."""

__version__ = "0.2.0"
