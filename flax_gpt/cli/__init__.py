"""What the command line needs beside its table of commands; nothing here imports jax before it has work to do."""
