"""Sampling that does not depend on the rank that does it."""
