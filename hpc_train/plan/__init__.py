"""Planners: pure functions from values to values. No torch, no processes, no clock."""
