"""`axsparse data prepare`: turns text files into memory-mapped tokens; a killed run can go on."""
