"""Communication between ranks; the engine calls XLA collectives only here."""
