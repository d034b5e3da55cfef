"""A server that loses ranks a thousand times: ``footprint`` is what it occupies, ``flatness`` whether that grew."""
