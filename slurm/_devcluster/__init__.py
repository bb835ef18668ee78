"""The parts of `devcluster`: standard library only, Python 3.9 and later, so that a system Python runs it."""
