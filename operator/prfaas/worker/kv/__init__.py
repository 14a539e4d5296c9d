"""How KV caches get from a prefill to a decode worker: three connectors, one port, leases, lanes, a checksum, one use.

`connector` is what the engine sees, `nixl_pull`, `nixl_push` and `mooncake` are what `--kv-transfer-config` names. The
fields that travel through the router, leases, legs and failures are vLLM's; the frames on the port (`wire`) are ours.
"""
