"""Starting runs: the driver, the batch script, submit, exec, and what is known of a run afterwards."""
