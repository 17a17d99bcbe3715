"""Long runs of `tune` on a tiny model: disturbed, and beside other tools."""
