"""What ranks, operators and supervisors speak: sealed frames, messages, and the sockets under them."""
