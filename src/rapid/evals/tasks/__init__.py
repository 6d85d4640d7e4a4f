"""The benchmarks: how each one's rows become items, and how its items are asked."""
