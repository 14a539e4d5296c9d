"""Emulated datacenters on one machine: kind clusters joined by bandwidth-limited lines.

`python -m e2e.datacenters` is the command, `e2e.datacenters.datacenters.Datacenters` the same from Python.
docs/datacenters.md explains why each piece is there.
"""
