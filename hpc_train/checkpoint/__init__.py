"""Save and load of training state under global names and shapes."""
