#!/bin/bash
# Trains under SLURM until its time is nearly over, saves, and submits itself again. Edit it at will.
# `axsparse submit --slurm` fills it in. Directives: slurm.schedmd.com/sbatch.html
#SBATCH --job-name=@job_name@
#SBATCH --nodes=@nodes@ --ntasks-per-node=@per_node@ --cpus-per-task=@cpus@
#SBATCH --gpus-per-node=@gpus@
#SBATCH --time=@time@ --signal=B:USR1@@margin@
#SBATCH --no-kill --requeue --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --account=@account@
#SBATCH --partition=@queue@
#SBATCH @directives@

[ -n "$SLURM_JOB_NODELIST" ] || { echo "axsparse: error: this is no job of SLURM; submit it: sbatch $0" >&2; exit 78; }
cd -- @folder@ || exit 66; python=@python@ axsparse_began=$(date +%s) # --setup may name another
export OMP_NUM_THREADS=@threads@ SLURM_OVERLAP=1 PRTE_MCA_rmaps_default_mapping_policy=slot
@setup@
set -- "$({ set +x; } 2>/dev/null; { unset -v script run_dir train nodes per_node replica fewer save_at margin pause most failures progress cancelled unfit cap code seen list count told shape unit there host ranks pid before wait SECONDS AXSPARSE_RANKS; unset -f hosts answers start tell submit saved; } 2>&1 | head -n1)"; [ -z "$*" ] || { echo "axsparse: error: ${*#*unset: }, and this script sets it; have --setup use another name" >&2; exit 78; }
set +eufkC +o pipefail +o posix; shopt -u failglob nullglob expand_aliases; unset IFS GLOBIGNORE; trap - ERR; SECONDS=$(($(date +%s) - axsparse_began)); cd -- @folder@ || exit 66 # whatever that has changed
script=@script@ # this file, which is submitted again
run_dir=@run_dir@ # where all nodes see it, such as on the scratch file system
train=(@train@); "$python" -m axsparse config show "${train[@]}" >/dev/null || exit # each try would end so
nodes=@nodes@ per_node=@per_node@ replica=@replica@ fewer=(@fewer@) # ranks a node and a replica; settings for fewer nodes
save_at=@save_at@ margin=@margin@ # seconds until it saves, and that saving may take
pause=30 most=5 # seconds until it tries again, doubled by each try without a new checkpoint; these tries at most
[ -e "$script" ] || { mkdir -p -- "${script%/*}" && cp -- "$0" "$script.$$" && mv -n -- "$script.$$" "$script"; }
cmp -s -- "$0" "$script"; [ "$?" -ne 1 ] || echo "axsparse: note: $script, which is submitted again, differs from this job's script" >&2
hosts() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }
answers() { timeout -k 5 20 srun -Q --overlap --mpi=none -N1 -n1 --ntasks-per-node=1 -c1 -w "$1" true; }
start() { exec @mpirun@ --host "$1" -n "$2" "${@:3}"; } # binding: MPICH -bind-to core:@cpus@, Open MPI --map-by slot:PE=@cpus@
# start() { exec srun --mpi=pmi2 -K1 -N"$(($2 < count ? $2 : count))" -n"$2" --ntasks-per-node="$per_node" -c@cpus@ -w "${1//:$per_node/}" "${@:3}"; }
tell() { kill -USR1 "$pid" 2>/dev/null; }
submit() { sbatch "$script"; }
saved() { printf '%s\n' "$run_dir"/checkpoints/step-*[0-9]/manifest.json | grep '[0-9]/manifest.json$' | sort; }
trap 'save_at=0' USR1; trap 'save_at=0 cancelled=1' TERM INT # the time is nearly over; or cancelled, so that no job follows
failures=0 progress='' cancelled='' unfit=0 cap=$((nodes * per_node)) code=75 seen=$(saved)
while [ "$SECONDS" -lt "$save_at" ]; do
  list='' count=0 code=70 told='' shape=() unit=$replica
  there=" $(for host in $(hosts); do answers "$host" >/dev/null && echo "$host" & done | tr '\n' ' ') "
  for host in $(hosts); do
    case "$there" in *" $host "*) list+=",$host:$per_node" count=$((count + 1)) ;; esac
  done
  ranks=$((count * per_node)); [ "$count" -eq "$nodes" ] || shape=("${fewer[@]}") ranks=$((ranks < cap ? ranks : cap)) unit=$((replica << (unfit > 7 ? unfit - 7 : 0)))
  export AXSPARSE_RANKS=$((ranks / unit * unit))
  echo "axsparse: $AXSPARSE_RANKS ranks on $count of $nodes nodes"
  if [ "$AXSPARSE_RANKS" -gt 0 ]; then
    start "${list#,}" "$AXSPARSE_RANKS" "$python" -m axsparse.train "${train[@]}" --run-dir="$run_dir" --resume=auto "${shape[@]}" & pid=$!
    while kill -0 "$pid" 2>/dev/null; do
      sleep 1
      [ "$SECONDS" -lt "$save_at" ] || [ -n "$told" ] || { told=$SECONDS && tell; }
      [ -z "$told" ] || [ "$((SECONDS - told))" -lt "$(((margin * 3 + 3) / 4))" ] || kill -KILL "$pid" 2>/dev/null # hangs
    done
    wait "$pid"; code=$?
  fi
  case "$code" in 0 | 65 | 66 | 130) exit "$code" ;; 75) [ "$SECONDS" -ge "$save_at" ] || exit 75 ;; esac
  [ "$code" -ne 78 ] || { [ "${#shape[@]}" -gt 0 ] || exit 78; cap=$((AXSPARSE_RANKS - 1)) unfit=$((unfit + 1)); } # fewer ranks may have a layout
  { [ "$code" -eq 78 ] && [ "$cap" -ge "$replica" ]; } || failures=$((failures + 1)); before=$seen seen=$(sort -u <(echo "$seen") <(saved))
  [ "$code" -eq 73 ] || [ "$before" = "$seen" ] || failures=0 progress=1 # a step that was never saved before; 73: another job has the directory
  [ "$failures" -lt "$most" ] || { echo "axsparse: error: failed $most times without a new checkpoint" >&2; exit "$code"; }
  for ((wait = pause * 2 ** failures; wait > 0 && SECONDS < save_at; wait--)); do sleep 1; done
done
[ -z "$cancelled" ] || exit "$code"
[ -n "$progress" ] || { echo "axsparse: error: no new checkpoint in this job, so none follows it" >&2; exit 70; }
[ -e "$script" ] || cp -- "$0" "$script"; submit || { sleep "$pause"; submit; } || echo "axsparse: error: saved, but $script cannot be submitted from here; submit it by hand" >&2
exit 75
