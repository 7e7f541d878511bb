"""Image folders as data: how files are decoded, cropped and flipped."""
