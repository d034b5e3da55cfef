"""Experts that move while the instance serves: what gates ask for, which moves are worth it, and how ranks switch together."""
