"""Requests: checked, scheduled into steps, and handed their tokens."""
