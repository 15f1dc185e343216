"""Workloads, spaces and choices: how kernel templates appear to MetaSchedule."""
