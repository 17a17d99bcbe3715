"""How much of a checkpoint is in memory at once while it is cut, in bytes; what the plan promises rests on it too."""

PIECES = 16
PIECE_BYTES = 2 * 1024 * 1024
"""Pieces of a rank file on their way to the disk, each written by one call."""
HOT_BYTES = 512 * 1024
"""What is read, then hashed, of the source at a time: half of the smallest second-level cache of today's server
cores, because hashing from memory takes half as long again."""
SCRATCH_BYTES = 512 * 1024
"""Whole rows, out of which a rank's part is picked."""
