"""Serving a port: requests → scheduler → engine → text → HTTP or terminal.

The engine knows token ids, slots and positions only; text begins in `answers`. Replicas, engines in processes of
their own, stand behind the same protocol (`source.TokenSource`).
"""
