"""What is particular to ranks on a GPU. On a machine without one, nothing of this is used.

With one GPU per rank this is the production layout; where there are fewer, several ranks share one (:mod:`.gpu_sharing`).
"""
