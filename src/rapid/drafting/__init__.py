"""Drafters: what proposes tokens. Floor 2: knows models and sampling, never the target or the verdict."""
