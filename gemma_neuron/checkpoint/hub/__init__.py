"""Checkpoints on the Hugging Face hub: the only importer of huggingface_hub.

In: a hub id. Out: `HubFolder`, its files by ranges or downloaded into the hub's own cache.
"""
