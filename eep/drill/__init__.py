"""Drills against a running server: load whose every token is checked, faults on purpose, and the story of both.

``server`` starts a real one on a device (``devices``, ``mps``) · ``load`` clients that compare what they get with the
fault-free answers · ``margins`` prompts whose answers can be compared · ``faults`` kills and worse · ``story`` what came of
it, in figures.
"""
