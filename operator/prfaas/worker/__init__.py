"""The GPU-less vLLM worker: same protocol, modelled time, real KV bytes."""
