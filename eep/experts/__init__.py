"""Experts: where they live, how a lost one comes back, and who keeps a spare copy.

``placement`` decides where experts live, ``repair_plan`` where the bytes of a missing one come from,
``repair`` moves them, ``backup`` keeps every expert in host memory, and ``routing`` shows the result to the
kernels.
"""
