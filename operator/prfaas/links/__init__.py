"""Peers: exchange publishing and reading, endpoint mirroring."""
