"""Lengths that change from call to call: cases, what runs them, requirements and the page."""
