"""Experts that move while the instance serves: what is asked for, which moves are worth it, how ranks switch together."""
