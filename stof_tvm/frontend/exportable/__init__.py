"""Makes models exportable: caches, experts, windows, guards in forms without values; and decompositions quick."""
