"""PrfaaS: prefill an LLM in one datacenter and decode it in another, on Kubernetes."""
