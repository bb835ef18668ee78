"""Save a run's state: by the node agents beside the training, or by the ranks themselves."""
