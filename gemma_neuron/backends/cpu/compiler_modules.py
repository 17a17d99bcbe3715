"""Imports what tracing and compiling need of torch, which takes as long as a small unit's code: done once, in the
server that compile workers are forked from. Nothing here starts a thread or a process where Triton is not installed.
"""

import torch._dynamo
import torch._inductor.compile_fx
import torch.export._trace  # noqa: F401
