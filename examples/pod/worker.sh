#!/usr/bin/env bash
# Runs a command on one host of a TPU slice. tpu_vm.sh calls it on every worker. Manual use:
#
#   worker.sh start RUN COMMAND...   starts COMMAND, detached from the terminal, output to a file
#   worker.sh status RUN             prints one line: "HOST running", "HOST exited CODE", "HOST absent"
#   worker.sh log RUN [LINES]        prints the end of the output
#   worker.sh follow RUN             prints the output as it comes, until the run ends
#   worker.sh stop RUN               ends all processes of the run, after 30 s by force
#
# Files: ~/xla_fsdp_runs/RUN/{log,pid,code}. Exit code 2: wrong usage.
set -euo pipefail

fail() {
  echo "worker.sh: $1" >&2
  exit 2
}

[[ $# -ge 2 ]] || fail "usage: worker.sh start|status|log|follow|stop RUN [COMMAND...]"
action=$1
run=$2
shift 2
[[ $run =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "RUN must be a plain name, got '$run'"
folder=${HOME:?}/xla_fsdp_runs/$run
host=$(hostname)

alive() { # whether the process group of the run still has a process
  [[ -s $folder/pid ]] && kill -0 -- "-$(<"$folder/pid")" 2>/dev/null
}

start() {
  [[ $# -ge 1 ]] || fail "start needs a command"
  ! alive || fail "run '$run' is running on $host: stop it first, or choose another name"
  rm -rf "$folder"
  mkdir -p "$folder"
  # A new session, so that it outlives the ssh connection, and all its processes can be ended.
  # shellcheck disable=SC2016 # expanded by the inner shell
  PJRT_DEVICE="${PJRT_DEVICE:-TPU}" PYTHONUNBUFFERED=1 setsid bash -c '
    folder=$1; shift
    echo $$ > "$folder/pid"
    trap : TERM # ends the processes of the command, but this one still writes the exit code
    code=0; "$@" || code=$?
    echo "$code" > "$folder/code.new"
    mv "$folder/code.new" "$folder/code"
  ' worker "$folder" "$@" >"$folder/log" 2>&1 </dev/null &
  for _ in {1..50}; do
    [[ -s $folder/pid ]] && break
    sleep 0.1
  done
  echo "$host started"
}

status() {
  if [[ -s $folder/code ]]; then
    echo "$host exited $(<"$folder/code")"
  elif alive; then
    echo "$host running"
  elif [[ -s $folder/pid ]]; then
    echo "$host exited 137" # killed, so that there is no exit code
  else
    echo "$host absent"
  fi
}

stop() {
  if alive; then
    local group
    group=$(<"$folder/pid")
    kill -TERM -- "-$group" 2>/dev/null || true
    for _ in {1..300}; do # 30 s for the ranks to save
      alive || break
      sleep 0.1
    done
    kill -KILL -- "-$group" 2>/dev/null || true
  fi
  echo "$host stopped"
}

case $action in
  start) start "$@" ;;
  status) status ;;
  stop) stop ;;
  log)
    [[ ${1:-100} =~ ^[0-9]+$ ]] || fail "LINES must be a number, got '$1'"
    [[ -f $folder/log ]] || fail "no run '$run' on $host"
    tail -n "${1:-100}" "$folder/log"
    ;;
  follow)
    [[ -f $folder/log ]] || fail "no run '$run' on $host"
    # tail must not wait for the run's process: in a container whose first process reaps no children
    # it stays listed after its end, and tail would never end.
    while kill -0 $$ && alive && [[ ! -s $folder/code ]]; do sleep 0.5; done &>/dev/null &
    tail -n +1 -F --pid=$! "$folder/log"
    ;;
  *) fail "unknown action '$action'" ;;
esac
