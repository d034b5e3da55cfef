"""How a lost expert comes back: which source it comes from, and how its bytes are read and verified."""
