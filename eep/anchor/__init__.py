"""Memory that outlives its process: the keeper holds its descriptors, and the next life of a rank finds them there."""
