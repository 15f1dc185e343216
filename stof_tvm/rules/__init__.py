"""Rules of `masks.runtime` in engines: traced into the graph, what calls found, and the proof that it is right."""
