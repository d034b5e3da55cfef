"""Draws that do not depend on who makes them."""
