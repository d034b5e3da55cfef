"""Links between supervisors: what one knows of its ranks reaches the others without the store."""
