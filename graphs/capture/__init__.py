"""Graphs of steps: what is captured, under which key, how, and what keeps a replay honest."""
