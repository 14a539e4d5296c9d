"""A datacenter's own small server for its peers' fast questions."""
