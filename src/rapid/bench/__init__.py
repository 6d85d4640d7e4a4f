"""Benchmarks of speed: `decode` (methods side by side), `session` (what a second question costs), `limits` (how far
a step is from what the machine can do). Each gives one JSON-able report; tables and plots are made from reports.
"""
