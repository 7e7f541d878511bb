#!/bin/bash
# A SLURM job that saves before its time ends, and goes on from there when it starts again.
# `axsparse submit --slurm` makes it of launch/slurm.sh.
#SBATCH --job-name=@job_name@
#SBATCH --nodes=@nodes@
#SBATCH --ntasks=@ranks@
#SBATCH --ntasks-per-node=@ranks_per_node@
#SBATCH --distribution=block
#SBATCH --cpus-per-task=@cpus_per_rank@
?gpus_per_node #SBATCH --gpus-per-node=@gpus_per_node@
#SBATCH --time=@clock@
#SBATCH --signal=B:USR1@@margin@
#SBATCH --requeue
#SBATCH --no-kill
?chained #SBATCH --array=1-@chain@%1
#SBATCH --open-mode=append
#SBATCH --output=@log@
?account #SBATCH --account=@account@
?queue #SBATCH --partition=@queue@
?directives @directives@

cd -- @folder@ || exit 66
python=@python@
?setup . @setup@ || exit 78
export OMP_NUM_THREADS=@threads@ PYTHON="$python"
?by_srun export MPIRUN='srun@pmi@ --cpus-per-task=@cpus_per_rank@'
?by_mpirun export MPIRUN=@mpirun@

# SLURM sends USR1 to this script alone. The ranks finish their step, save, and exit with 75.
pid='' again='' warned=''
trap 'again=1 warned=1; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null' USR1
# Where a rank or node dies, this goes on with the nodes that are left.
"$python" -m axsparse launch --restarts @restarts@ @ranks@ @train@ &
pid=$!
while :; do
  again=''
  wait "$pid"
  code=$?
  [ -n "$again" ] || break # a signal ends `wait`, but not the ranks
done
# A signal that comes just as the ranks end costs their code: bash leaves 255, Python 138.
case "$warned$code" in 1255 | 1138) code=75 ;; esac

?chained case "$code" in
?chained   # Done, or what would only happen again: the rest of the chain is not needed.
?chained   0 | 65 | 66 | 74 | 78) scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" ;;
?chained esac
?requeued if [ "$code" -eq 75 ]; then
?requeued   trap '' USR1 TERM # requeueing ends this script
?requeued   if scontrol requeue "$SLURM_JOB_ID"; then
?requeued     sleep 300
?requeued   else
?requeued     echo "axsparse: error: saved, but SLURM does not requeue job $SLURM_JOB_ID; submit it again" >&2
?requeued   fi
?requeued fi
exit "$code"
