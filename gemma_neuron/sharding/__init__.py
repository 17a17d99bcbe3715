"""Plan the layout of a model over ranks, and write one weight file a rank."""
