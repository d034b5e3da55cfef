"""Benchmarks: a folder for each, run as ``python -m bench.<folder>``; what they measured is in ``results``."""
