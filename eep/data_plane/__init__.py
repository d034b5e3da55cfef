"""How tokens travel: a rank's memory, its peers, dispatch and combine."""
