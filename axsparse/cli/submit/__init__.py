"""`axsparse submit`: job scripts for SLURM and LSF, from a request that is checked first."""
