"""Communication between ranks; the only package that imports XLA collectives."""
