"""The ledger of accepted requests, and the records that it keeps and returns."""
