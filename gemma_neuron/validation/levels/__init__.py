"""One file per level; each has `run(context) -> LevelResult`."""
