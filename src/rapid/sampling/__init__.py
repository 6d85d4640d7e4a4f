"""The mathematics of sampling and acceptance. Floor 1: torch only; no models, no global randomness."""
