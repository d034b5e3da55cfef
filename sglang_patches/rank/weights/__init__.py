"""Weights that outlive the process of their rank: its next life takes them over instead of loading them."""
