"""Measuring answers: benchmark tasks, exact scorers, the runner, statistics, run directories and their report.

The way of a run: experiment.py (tasks, models, settings) -> readings.py (one document, all of its questions) ->
runner.py (what is missing) -> asking.py (one answer) -> store.py (on disk) -> summary.py, report/.
"""
