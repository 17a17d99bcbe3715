"""What Gemma is: geometry, tensors and model code per family. Knows no stage and no back end."""
