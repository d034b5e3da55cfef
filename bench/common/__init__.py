"""What several benchmarks use: arguments, rank processes, timing, a yardstick on a GPU, provenance."""
