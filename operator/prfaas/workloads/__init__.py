"""Pure: (spec, roles, endpoints) -> the Kubernetes objects wanted."""
