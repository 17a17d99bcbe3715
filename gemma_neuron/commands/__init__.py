"""One module a group of commands: parse, call one function of the pipeline, render."""
