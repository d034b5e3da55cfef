"""What an operator sees: the event log, metrics, and timelines of drills."""
