"""From a source to what is known about it: `open_source`, `CheckpointIndex.open`, `audit`.

In: a folder (hub ids and s3:// later). Out: `Source`, `CheckpointIndex` (headers only), `AuditReport`.
Nothing here imports torch or transformers, and numpy only where values are read.
"""
