"""Stand-ins for the closed parts of the Neuron SDK (torch_neuronx, torch_xla, libneuronxla, neuronx-cc, the runtime).

Written from the calls that NxD's own source makes into them (each place is named at its function), they refuse what
those calls would not give, and execute a traced graph on the CPU for all ranks. They prove NxD's and our own
Python around the closed parts, nothing about the closed parts themselves.
"""
