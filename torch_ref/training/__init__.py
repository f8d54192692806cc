"""The torch side of loss, clip, optimizers and schedules."""
