"""Every expert once more, in host memory: the service that keeps it, and the ranks' side of it."""
