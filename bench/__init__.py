"""Benchmarks, one folder each: ``python -m bench.<folder> --help`` says what it measures.

``common`` holds what several of them use, ``results`` what they measured.
"""
