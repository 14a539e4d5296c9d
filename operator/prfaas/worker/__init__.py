"""A vLLM worker without a GPU: real HTTP, real KV bytes on a real socket, time from a Profile.

`oracle` says what the model answers, `scheduler` when, `kv` moves the bytes, `http` speaks vLLM's protocol. What it
does as vLLM 0.33 does, and what it leaves out, is in docs/worker.md.
"""
