"""Image folders as data sets: files are decoded, cropped and flipped."""
