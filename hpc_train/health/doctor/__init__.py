"""`hpc-train doctor`: what works here, and how to mend what does not.

Each subject has a module of two halves: a thin one that gathers facts, and pure functions from facts to findings.
"""
