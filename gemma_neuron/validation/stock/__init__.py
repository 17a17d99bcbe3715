"""Stock transformers' Gemma with one decoder layer in memory at a time. Knows nothing of this project's models.

In: a checkpoint folder. `tensors` maps its weight files, `skeleton` builds stock modules without weights, `layers`
gives them their weights for as long as they run.
"""
