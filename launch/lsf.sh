#!/bin/bash
# An LSF job that saves before its time ends, and goes on from there when it starts again.
# `axsparse submit --lsf` makes it of launch/lsf.sh.
?requeued #BSUB -J @job_name@
?chained #BSUB -J "@job_name@[1-@chain@]%1"
?by_jsrun #BSUB -nnodes @nodes@
?by_mpirun #BSUB -n @ranks@
?by_mpirun #BSUB -R "span[ptile=@ranks_per_node@]"
?slots_with_gpus #BSUB -gpu "num=@gpus_per_node@"
#BSUB -W @limit@
#BSUB -wa USR1
#BSUB -wt @warning@
?requeued #BSUB -r
?requeued #BSUB -Q 75
#BSUB -o @log@
?account #BSUB -P @account@
?queue #BSUB -q @queue@
?directives @directives@

cd -- @folder@ || exit 66
python=@python@
?setup . @setup@ || exit 78
export OMP_NUM_THREADS=@threads@ PYTHON="$python"
?by_jsrun export MPIRUN='jsrun -a1 -g@gpus_per_rank@ -c@cpus_per_rank@'
?by_mpirun export MPIRUN=@mpirun@

# LSF warns with USR1. The ranks finish their step, save, and exit with 75.
pid='' again='' warned=''
trap 'again=1 warned=1; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null' USR1
# Where a rank or host dies, this goes on with the hosts that are left.
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
?chained   0 | 65 | 66 | 74 | 78)
?chained     [ "$LSB_JOBINDEX" -eq @chain@ ] || bkill "${LSB_JOBID}[$((LSB_JOBINDEX + 1))-@chain@]"
?chained     ;;
?chained esac
exit "$code"
