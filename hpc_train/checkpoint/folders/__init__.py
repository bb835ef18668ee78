"""The checkpoints of a run: where they are, which there are, which may go."""
