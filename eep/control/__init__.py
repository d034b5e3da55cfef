"""Which ranks are alive: the supervisor of a host, the member in a rank, the store between hosts, and the wire they
speak on.

:mod:`eep.membership` decides; this package only carries. It needs msgspec; the data plane does not need it.
"""
