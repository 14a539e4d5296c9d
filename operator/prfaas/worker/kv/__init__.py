"""How KV caches leave a prefill worker: leases on blocks, a pull over TCP, a checksum, one use.

The part of vLLM's NIXL pull connector is played by a small protocol of our own on one port (`wire`); the fields that
travel through the router, the lease and its heartbeats are vLLM's.
"""
