"""Back ends by name, imported late, never substituted for one another."""
