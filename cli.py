"""Launcher for a checkout without an install: runs the command `gemma-neuron`; nothing else."""

from gemma_neuron.cli import main

if __name__ == "__main__":
    main()
