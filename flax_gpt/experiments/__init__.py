"""What the figures show, as numbers. Each module has `run(seed, …)`, which returns a dataclass that goes into a JSON file, and the functions over
arrays or models behind it, which `torch_ref.experiments` repeats.
"""
