"""Exported programs at larger sizes than their inputs have, whose results do not depend on what pads these."""
