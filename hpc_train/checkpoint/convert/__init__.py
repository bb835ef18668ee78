"""From and to Hugging Face folders and folders of torch.distributed.checkpoint."""
