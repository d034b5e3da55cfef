"""The ledger of accepted requests, and what it speaks of."""
