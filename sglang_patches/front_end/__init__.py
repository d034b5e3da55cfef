"""At the server's door: requests go to ranks that are in, and are replayed when one is lost."""
