"""Backends: what runs the models of an engine, chosen by name. Floor 4."""
