"""EEP's own HTTP routes on the server's port: status, operations, events, readiness, and a page to look at."""
