#!/bin/bash
# Trains without a scheduler, and goes on by itself when a rank dies or hangs:
#
#   launch/mpirun.sh 8 --config quickstart.yaml --set layout.g_inter=4 --run-dir runs/mine
#
# The first argument is the number of ranks, the others are those of axsparse.train; --run-dir
# says where to go on. `kill -USR1` of this script saves and stops.
#   MPIRUN    the launcher and its options, such as "mpirun --hostfile hosts" (mpirun)
#   PYTHON    the interpreter (python)
#   RESTARTS  how often to start again, at most (3)

case "${1-}" in
  '' | *[!0-9]* | 0*)
    echo "axsparse: error: ranks: '${1-}' is no whole number of at least 1; see the head of $0" >&2
    exit 78
    ;;
esac
ranks=$1
shift
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" AXSPARSE_RANKS="$ranks"
read -r -a launcher <<<"${MPIRUN:-mpirun}"

pid='' again='' warned='' left="${RESTARTS:-3}"
trap 'again=1 warned=1; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null' USR1
while :; do
  "${launcher[@]}" -n "$ranks" "${PYTHON:-python}" -m axsparse.train "$@" --resume auto &
  pid=$!
  while :; do
    again=''
    wait "$pid"
    code=$?
    [ -n "$again" ] || break # a signal ends `wait`, but not the ranks
  done
  # A signal that comes just as the ranks end costs bash their code, and leaves 255.
  [ -z "$warned" ] || [ "$code" -ne 255 ] || code=75
  case "$code" in
    0 | 65 | 66 | 74 | 75 | 78 | 130) break ;; # done, stopped, or what no restart mends
  esac
  [ "$left" -gt 0 ] || break
  left=$((left - 1))
  echo "axsparse: the ranks ended with $code; going on from the last checkpoint" >&2
done
exit "$code"
