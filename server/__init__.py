"""HTTP front end; knows messages, never tensors."""
