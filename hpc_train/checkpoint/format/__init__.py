"""What a checkpoint is made of, and how it lies in files: boxes, archives, manifest, torch's index."""
