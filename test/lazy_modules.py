"""Modules that functions of ranks use, imported by them: pytest's own process need not."""

from importlib import import_module


class Lazy:
    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self.name), name)


torch_xla, xm, xr = map(Lazy, ("torch_xla", "torch_xla.core.xla_model", "torch_xla.runtime"))
