"""Random checkpoints of model families, to serve where a real model does not fit.

``checkpoint`` writes one · ``model_sizes`` how large it is · ``family`` what makes a family, ``qwen3``, ``deepseek_v3``,
``glm4_moe`` and ``gpt_oss`` those that there are · ``byte_tokenizer`` the tokenizer of all · ``block_fp8`` experts in fp8.
"""
