sbatch() { echo "submitted again"; }
bsub() { cat > "$HERE/again" && sbatch; }
qsub() { [ "$*" = "$HERE/r.sh" ] && sbatch; }
scontrol() { [ "$1 $2" = "show hostnames" ] && printf '%s\n' $HOSTS; }
srun() { case "$*" in *" -w $GONE true") return 1 ;; *" -w "*" true") ;; *) return 2 ;; esac; }
blaunch() { [ "$1 $2" != "$GONE true" ]; }
pbs_tmrsh() { blaunch "$@"; }
flux() {
  case "$*" in
    "getattr jobid") [ -n "$HOSTS" ] ;;
    "hostlist --expand --delimiter=\n instance") printf '%s\n' $HOSTS ;;
    "hostlist --expand --delimiter=\n avail") printf '%s\n' $HOSTS | grep -vxF "$GONE" ;;
    "--parent batch $HERE/r.sh") sbatch ;;
    "run -N"*" -n"*) [ "${2#-N}" -le "${3#-n}" ] && mpirun "${@:2}" ;; # nodes, ranks
    *) echo "flux: $*: no such job" >&2; return 2 ;;
  esac
}
mpirun() {
  printf '%s\n' "$PWD" "$@" > "$HERE/arguments"
  read -r code saved < "$HERE/next" || exit 70
  sed -i 1d "$HERE/next"
  [ -z "$saved" ] || { mkdir -p "$HERE/r/checkpoints/step-$saved" && echo "{}" > "$_/manifest.json"; }
  echo "ranks end with $code"
  exit "$code"
}
timeout() { shift 3; "$@"; }
exec() { "$@"; }
sleep() { [ "${wait:-0}" -eq 0 ] || printf %s "$1"; command sleep 0.01; }
