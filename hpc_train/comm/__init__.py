"""The one seam to MPI and torch.distributed: bootstrap, control messages, groups, collectives."""
