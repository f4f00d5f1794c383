"""What every room says about tensors: their types, their names, and their values by rows."""
