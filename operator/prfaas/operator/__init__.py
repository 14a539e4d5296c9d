"""Kopf glue: thin handlers that enqueue keys, one reconcile per kind."""
