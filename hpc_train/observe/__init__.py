"""Readers and pictures of what a run recorded."""
