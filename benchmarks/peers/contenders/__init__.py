"""One file for each framework, with a class that trains as its users would."""
