"""The data plane's brain: Envoy external processor, prefill leg, watches of endpoints and policy."""
