"""Symmetric memory: one region per rank, mapped by its peers."""
