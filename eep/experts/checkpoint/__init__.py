"""The experts of a checkpoint on disk."""
