"""Measurements: what this project takes, beside what PyTorch takes, on one machine in one run."""
