"""A stand-in for `neuronx_distributed`, for where its source is not at hand (`scripts/neuron-contract` has it).

Each member refuses any call its recorded signature (`gemma_neuron/data/neuron/calls.json`) refuses, and keeps what is
documented of it: exceptions nested, a new folder for each try and no resume, the in-place all-reduce, one `add`
per trace, routes by names and shapes but not dtypes, states of the first graph only, and weights that nobody checks.
"""
