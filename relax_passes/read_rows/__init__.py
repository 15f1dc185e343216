"""Rows of a layer that nothing reads are not computed: selections of rows move towards what is computed."""
