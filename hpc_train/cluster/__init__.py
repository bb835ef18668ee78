"""Facts about where this process runs: Slurm, host lists, devices, networks, limits, the environment.

Standard library only, so that the driver starts in milliseconds on a login node that has nothing else.
"""
