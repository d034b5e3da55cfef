"""What the SIGKILL of one process does to another that shares its GPU, by how much work the first leaves there."""
