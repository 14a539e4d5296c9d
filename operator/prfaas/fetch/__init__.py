"""Bring a model from where it is published to a folder: whole, checked, and not from zero when it was interrupted."""
