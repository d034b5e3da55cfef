"""What only ranks on a GPU need. On a machine without one, nothing of this is used.

In production each rank has a GPU of its own. Where there are fewer GPUs, several ranks share one (:mod:`.gpu_sharing`).
"""
