"""Parameters, gradients and the optimizer update on the host: docs/how-to/cpu-offload.md."""
