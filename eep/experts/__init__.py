"""Experts: where they live, how a lost one comes back, and where a spare copy is kept.

``placement`` decides where experts live. ``repair`` decides where the bytes of a missing one come from, and moves them.
``checkpoint`` reads experts from disk, ``backup`` keeps them in host memory, ``registry`` has what each rank says it holds.
``balancing`` moves experts while the instance serves.
``coverage`` puts these together view after view, and ``routing_tables`` show the result to the kernels.
"""
