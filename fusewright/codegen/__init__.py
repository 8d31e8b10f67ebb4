"""Text from graphs: programs on ATen operations; kernel families will stand beside them."""
