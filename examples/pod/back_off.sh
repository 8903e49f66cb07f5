#!/usr/bin/env bash
# Waits before a command is started again, so that a command that always fails is not restarted
# continuously: 10, 20, 40 ... at most 300 seconds before the first, second, third ... restart.
#
#   back_off.sh COMMAND...         waits, then runs COMMAND; $RESTART_ATTEMPT is the number of
#                                  restarts, or $TORCHELASTIC_RESTART_COUNT of torchrun; default 0
#   back_off.sh --seconds ATTEMPT  only prints the seconds
#
# BACK_OFF is the first wait, default 10. Exit code: COMMAND's; 2 for wrong usage.
set -euo pipefail

seconds() {
  local first=${BACK_OFF:-10} attempt=$1
  if ! [[ $first =~ ^[0-9]{1,4}$ && $attempt =~ ^[0-9]{1,9}$ ]]; then
    echo "back_off.sh: BACK_OFF and the attempt must be numbers, got '$first' and '$attempt'" >&2
    return 2
  fi
  ((attempt > 0)) || {
    echo 0
    return
  }
  ((attempt < 10)) || attempt=10
  local wait=$((10#$first << (10#$attempt - 1)))
  echo $((wait < 300 ? wait : 300))
}

if [[ ${1:-} == --seconds && $# -eq 2 ]]; then
  seconds "$2"
  exit
fi
[[ $# -ge 1 && $1 != --* ]] || {
  echo "back_off.sh: usage: back_off.sh COMMAND..." >&2
  exit 2
}
sleep "$(seconds "${RESTART_ATTEMPT:-${TORCHELASTIC_RESTART_COUNT:-0}}")"
exec "$@"
