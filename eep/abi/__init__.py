"""The native library behind its C ABI, and the structures mirrored from ``eep_cuda/include/eep``."""
