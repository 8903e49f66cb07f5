"""Parameters, gradients and the optimizer's work on the host: docs/how-to/cpu-offload.md."""
