"""Measurements. Every figure in the README and the docs comes from here."""
