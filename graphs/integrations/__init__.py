"""Doors: sessions inside other people's programs. A module imports the package it is for."""
