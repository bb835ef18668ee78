"""Copies of the state on the nodes' own disks, for quick restarts."""
