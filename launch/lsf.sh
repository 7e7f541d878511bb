#!/bin/bash
# An LSF job that saves before its time ends, and goes on from there when it starts again.
# `axsparse submit --lsf` makes it of launch/lsf.sh.
@directives@

cd -- @folder@ || exit 66
@setup@
export OMP_NUM_THREADS=@threads@ AXSPARSE_RANKS=@ranks@
python=@python@

@copy_environment@
# LSF warns with USR1. The ranks finish their step, save, and leave with 75.
pid='' again='' warned=''
trap 'again=1 warned=1; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null' USR1
@launch@ "$python" @train@ &
pid=$!
while :; do
  again=''
  wait "$pid"
  code=$?
  [ -n "$again" ] || break # a signal ends `wait`, but not the ranks
done
# A signal that comes just as the ranks end costs bash their code, and leaves 255.
[ -z "$warned" ] || [ "$code" -ne 255 ] || code=75

@remove_environment@
@ending@
exit "$code"
