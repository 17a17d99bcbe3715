"""gemma-neuron: ports Gemma to AWS Inferentia2, or says exactly what is wrong.

Importing the package costs nothing: no torch, no transformers, not even the metadata lookup
behind `__version__`, which happens when it is asked for.
"""


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("gemma-neuron")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
