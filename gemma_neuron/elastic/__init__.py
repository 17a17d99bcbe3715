"""Work on processes that may die: typed faults, an engine that sees them, a manager that goes on.

Whatever uses workers (compile units, serving replicas, fine-tuning ranks) talks to an `Engine` and, where
lost work is to be taken up again in the same process, wraps it in `Manager.elastic_retry`.
"""
