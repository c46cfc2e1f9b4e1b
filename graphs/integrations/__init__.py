"""Doors: sessions inside other people's programs. Each module imports the package that it is for."""
