"""Compile a port's graphs, unit by unit, each committed the moment it is done."""
