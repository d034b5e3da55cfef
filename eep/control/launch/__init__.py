"""How rank processes are started: as new interpreters, by forking, or from spares."""
