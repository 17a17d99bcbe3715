"""The neuron back end: NxD's fundamental units around our own model."""
