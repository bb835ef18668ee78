"""Transformers that know nothing of ranks."""
