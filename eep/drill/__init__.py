"""Drills against a running server: load whose every token is checked, faults on purpose, and the story of both.

``load`` clients that compare what they get with the fault-free answers · ``report`` what a drill showed, in figures.
"""
