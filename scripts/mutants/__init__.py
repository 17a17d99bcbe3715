"""Single faults for a port, and the matrix of which level of the validator sees each."""
