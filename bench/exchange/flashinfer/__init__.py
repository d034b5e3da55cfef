"""FlashInfer's one-sided MoE all-to-all as a contender, where the package flashinfer-python is at hand."""
