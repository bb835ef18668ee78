"""Bring a checkpoint back to all ranks: every stored byte is read once."""
