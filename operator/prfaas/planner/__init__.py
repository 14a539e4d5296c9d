"""Pure arithmetic: workload, throughput model, optimiser, simulator. No I/O, no clock, no Kubernetes."""
