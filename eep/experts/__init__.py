"""Experts: where they live, how a lost one comes back, and who keeps a spare copy.

``placement`` decides where experts live, ``repair`` where the bytes of a missing one come from, and moves them;
``checkpoint`` reads them from disk, ``backup`` keeps every expert in host memory, ``registry`` has what ranks say that they
hold. ``coverage`` puts these together view after view, and ``routing_tables`` show the result to the kernels.
"""
