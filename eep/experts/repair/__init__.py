"""How a lost expert comes back: from whom, and how its bytes are read and verified."""
