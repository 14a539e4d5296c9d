"""The arithmetic that decides how many, and from which length on.

For a workload, pools and links it says which threshold t per link, how many prefill (Np) and decode (Nd) instances,
what throughput and latency to expect, what limits it, and what more GPUs or a faster line would bring. Pure: no I/O, no
clock, no Kubernetes. `docs/model.md` derives the formulas; the equations are those of arXiv:2604.15039, section 3.
"""
