"""What an operator asks of a running server, as operations with an id: parsed, decided step by step, carried out, undone."""
