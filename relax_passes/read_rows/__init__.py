"""Of values of which some rows are read only, these rows are computed: selections move towards what is computed."""
