"""From a training step to a program, without running it."""
