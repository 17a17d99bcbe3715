"""The cpu back end: the same model code and plan, all ranks in one process, compiled by AOTInductor."""
