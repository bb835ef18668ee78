"""What outlives a training step on each node: the node agent."""
