"""What `scripts/lowering-check` runs; `child` and `llama` in the environment with torch_xla."""
