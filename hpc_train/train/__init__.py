"""Optimizer, step and loop of a training run."""
