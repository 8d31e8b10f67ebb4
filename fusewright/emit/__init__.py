"""Solution files: a problem's model with its generated kernels, in one file that needs nothing but PyTorch."""
