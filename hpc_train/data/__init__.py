"""Token datasets: the .bin/.idx pair, building one from text, packing, blends, the loader.

Nothing is imported here: `index`, `tokenizer`, `sources`, `build` and `show` must load on a login node
without torch, and `arguments` without NumPy.
"""
