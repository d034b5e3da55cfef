"""The supervisor of a host: it starts ranks, sees them end, answers, and leaves nothing behind."""
