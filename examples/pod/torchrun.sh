#!/usr/bin/env bash
# Runs an example under torchrun. Start it on every host of a slice, with the same arguments.
# torchrun.sh --help describes the options, and README.md in this folder when to use it.
set -euo pipefail

usage() {
  cat <<'HELP'
torchrun.sh --slice=SLICE --rdzv_endpoint=HOST[:PORT] [OPTIONS] -- SCRIPT [FLAGS...]

  --slice=SLICE             such as v4-32: sets the numbers of hosts and processes; 2xv5litepod-16:
                            two slices that train together, with the hosts of both
  --slice_id=N              with several slices, the slice of this host, from 0, if neither GKE nor a
                            queued resource sets it; --rdzv_endpoint is then slice 0's first host
  --rdzv_endpoint=HOST:PORT the rendezvous of the hosts: the address of one host, the same on all.
                            Default: the first of TPU_WORKER_HOSTNAMES, which GKE sets, or with several
                            slices the host of MEGASCALE_COORDINATOR_ADDRESS; port 29400
  --rdzv_id=ID              id of the run; default xla_fsdp
  --max_restarts=N          start all hosts again if one fails, or ends with 75 because its machine
                            is preempted; default 0. SCRIPT must resume. The pause before is 10, 20,
                            40 ... at most 300 s (back_off.sh)
  --nnodes=N, --nproc=N     numbers of hosts, and of processes on each, instead of --slice
  --plain                   one process on each host, which starts the ranks, as without torchrun.
                            v2 and v3 need it (two ranks a chip), so --slice=v3-128 sets it
  --dry_run                 only print the command

Exit code: 0 if all is well, 2 for wrong usage, else torchrun's.
HELP
}

fail() {
  echo "torchrun.sh: $1" >&2
  exit 2
}

slice='' slice_id='' rdzv_endpoint='' rdzv_id=xla_fsdp max_restarts=0 nnodes='' nproc='' plain='' slices=1 dry_run='' command=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --slice=* | --slice_id=* | --rdzv_endpoint=* | --rdzv_id=* | --max_restarts=* | --nnodes=* | --nproc=*)
      [[ -n ${1#*=} ]] || fail "${1%%=*} needs a value"
      printf -v "$(sed 's/^--//; s/=.*//; q' <<<"$1")" '%s' "${1#*=}"
      ;;
    --plain | --dry_run) printf -v "${1#--}" yes ;;
    --help) usage && exit 0 ;;
    --) shift && command=("$@") && break ;;
    *) fail "unknown option '$1' (values go after '='; the script goes after --)" ;;
  esac
  shift
done
[[ ${#command[@]} -gt 0 ]] || fail "no script given; it goes after --"

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if [[ -n $slice ]]; then
  [[ -z $nnodes && -z $nproc ]] || fail "--slice excludes --nnodes and --nproc"
  figures=$("$python" "$root/examples/pod/slice_hosts.py" "$slice") || exit 2
  read -r nnodes nproc ranks_a_chip slices <<<"$figures"
  [[ $ranks_a_chip == 1 ]] || plain=yes
fi
[[ -z $plain ]] || nproc=1
for pair in "nnodes $nnodes" "nproc $nproc"; do
  [[ $pair =~ \ [1-9][0-9]*$ ]] || fail "--${pair% *} must be a positive number (or give --slice)"
done
[[ $max_restarts =~ ^[0-9]+$ ]] || fail "--max_restarts must be a number, got '$max_restarts'"
if [[ -z $rdzv_endpoint ]]; then
  meeting=TPU_WORKER_HOSTNAMES # of one slice
  ((slices == 1)) || meeting=MEGASCALE_COORDINATOR_ADDRESS
  rdzv_endpoint=${!meeting:-}
  rdzv_endpoint=${rdzv_endpoint%%,*}
  ((slices == 1)) || rdzv_endpoint=${rdzv_endpoint%:*}
  [[ -n $rdzv_endpoint ]] || fail "--rdzv_endpoint is required ($meeting is not set)"
fi
[[ $rdzv_endpoint == *:* ]] || rdzv_endpoint+=:29400
if [[ -n $slice_id ]]; then
  if ! [[ $slice_id =~ ^(0|[1-9][0-9]{0,3})$ ]] || ((slices == 1 || slice_id >= slices)); then
    fail "--slice_id must be less than the number of slices in --slice=2x..., got '$slice_id'"
  fi
  export MEGASCALE_NUM_SLICES=$slices MEGASCALE_SLICE_ID=$slice_id
  export MEGASCALE_COORDINATOR_ADDRESS=${rdzv_endpoint%:*}:8080
fi
((slices == 1)) || export XLA_FSDP_SLICES=$slices # and if a host knows of others, it says so

line=("$python" -m torch.distributed.run --nnodes="$nnodes" --nproc-per-node="$nproc"
  --rdzv-backend=c10d --rdzv-id="$rdzv_id" --rdzv-endpoint="$rdzv_endpoint"
  --max-restarts="$max_restarts")
line+=(--no-python bash "$root/examples/pod/back_off.sh")
if [[ -n $plain ]]; then
  # Without this variable of torchrun, SCRIPT starts the ranks itself.
  line+=(env -u TORCHELASTIC_RUN_ID)
fi
line+=("$python" "${command[@]}")
export PJRT_DEVICE=${PJRT_DEVICE:-TPU}
if [[ -n $dry_run ]]; then
  for name in MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID MEGASCALE_COORDINATOR_ADDRESS XLA_FSDP_SLICES; do
    [[ ${slices} == 1 || -z ${!name:-} ]] || printf '%s=%s ' "$name" "${!name}"
  done
  echo "PJRT_DEVICE=$PJRT_DEVICE ${line[*]@Q}"
else
  exec "${line[@]}"
fi
