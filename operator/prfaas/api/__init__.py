"""Pydantic models of the three kinds and of the documents exchanged; the CRD generator. No I/O."""
