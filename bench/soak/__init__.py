"""A server over a long time: ``__main__`` kills ranks and looks for growth, ``load`` runs beside busy processes."""
