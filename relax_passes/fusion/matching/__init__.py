"""Which problem of the kernel templates a segment is."""
