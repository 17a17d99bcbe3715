"""A stand-in: see tests/neuron/closed."""

from tests.neuron.closed.install import provide

provide(__name__)
