"""A stand-in: see tests/neuron/nxd."""

from tests.neuron.nxd.install import provide

provide()
