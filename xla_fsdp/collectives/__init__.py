"""How bytes travel between ranks; the only importer of XLA collectives."""
