"""What an operator sees: events now, metrics and timelines later."""
