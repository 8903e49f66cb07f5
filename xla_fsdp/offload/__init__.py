"""Parameters, gradients and the optimizer's work on the host: docs/offload.md."""
