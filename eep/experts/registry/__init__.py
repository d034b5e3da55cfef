"""What ranks and backup services publish, and where they find it."""
