"""The exchange through NVSHMEM as a contender, where the package nvidia-nvshmem-cu13 is at hand."""
