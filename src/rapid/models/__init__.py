"""Language models: weights, caches, attention. Floor 1: knows nothing of drafting, decoding or documents."""
