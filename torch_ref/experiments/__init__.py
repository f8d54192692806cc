"""The functions over arrays and models behind `flax_gpt.experiments`, in torch: the same results from the same inputs."""
