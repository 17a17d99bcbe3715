"""`python -m gemma_neuron`: the same program as the command `gemma-neuron`."""

from gemma_neuron.cli import main

if __name__ == "__main__":
    main()
