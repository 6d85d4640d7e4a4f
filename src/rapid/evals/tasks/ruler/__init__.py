"""RULER (Hsieh et al. 2024): thirteen tasks whose items are made, not collected, at any length.

Re-implemented from the paper and the behaviour of NVIDIA/RULER c3f5e3b (Apache-2.0). The original's essays
are not free to pass on: the haystack is Jane Austen's Persuasion (public domain).
"""
