"""Graphs as flowcharts, before and after a pass."""
