"""Gemma 3 text: 270M, 1B and the text part of 4B, 12B, 27B."""
