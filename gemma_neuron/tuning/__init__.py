"""Adapters: fine-tuned before a port, merged into the checkpoint that is ported."""
