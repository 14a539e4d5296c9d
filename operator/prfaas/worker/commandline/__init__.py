"""The command line of `vllm serve` 0.33: 321 flags from a table; rewritten, parsed, checked, refused as vLLM does."""
