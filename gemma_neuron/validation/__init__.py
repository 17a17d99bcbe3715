"""Does a port work? A reference made by stock transformers, levels 0 to 6, a verdict.

In: a port, its loaded runner and the checkpoint or a golden. Out: ValidationReport. Refused: a reference
that stock transformers did not make, or one of another checkpoint, template or prompt set.
"""
