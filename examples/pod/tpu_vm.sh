#!/usr/bin/env bash
# Runs an example on all workers of a TPU VM slice; it needs only gcloud.
# tpu_vm.sh --help describes the options, and README.md in this folder when to use it.
# Flags of gcloud are from `gcloud compute tpus ... --help` of Google Cloud SDK 528. All workers run
# the same command, as in PyTorch/XLA's "PJRT Runtime", section "Pods".
set -euo pipefail

usage() {
  cat <<'HELP'
tpu_vm.sh [OPTIONS] ACTION [ACTION...] [-- COMMAND...]

Actions, in the order of a run:
  create   create the slice; with --queued as a queued resource, and wait until it is ACTIVE
  setup    copy this checkout to every worker (~/xla_fsdp), install it there; --nfs mounts a share
  check    run xla_fsdp.preflight here: checks the health of the slice and the setup of all workers
  start    start COMMAND in ~/xla_fsdp on every worker, detached
  wait     wait until all workers are done; if one fails or is lost, stop all
  status   print one line for each worker
  logs     follow worker 0 (--worker=N: another one)
  stop     end the run on every worker
  delete   delete the slice

Options:
  --name=NAME       the slice (required)         --zone=ZONE        (required)
  --project=ID      default: gcloud's            --type=TYPE        such as v3-128, for create
  --runtime=VERSION default: by the type         --spot             create as Spot VMs
  --queued          create as a queued resource  --run=RUN          default: train
  --nfs=SERVER:/DIR mount on /mnt/xla_fsdp       --worker=N         for logs, of the first slice; default 0
  --poll=SECONDS    between polls; default 30    --dry_run          only print the commands
  --slices=N        N slices of --type that train together, NAME-0, NAME-1 ..., as one queued resource
  --only=0,2        all actions except create, delete: use only these slices, as slices 0 and 1
  --min_slices=N    wait, with --max_restarts: continues with the slices that are left, if N or more
  --max_restarts=N  wait starts COMMAND again after a failure, on all workers, at most N times, and
                    10, 20, 40 ... at most 300 s later (back_off.sh); default 0. A slice that is
                    lost is created again first, if --type is given

The same COMMAND runs on all workers, for example
  .venv/bin/python examples/train_vit.py --data_dir=/mnt/xla_fsdp/imagenet --ckpt_dir=/mnt/xla_fsdp/vit --resume
Exit code: for wait COMMAND's on the first worker that failed (75: its machine is preempted, and a
checkpoint is saved), or 75 if the slice is lost or was preempted; 2 for wrong usage.
HELP
}

fail() {
  echo "tpu_vm.sh: $1" >&2
  exit 2
}

name='' zone='' project='' type='' runtime='' run=train nfs='' worker=0 poll=30 max_restarts=0
slices=1 only='' min_slices='' spot='' queued='' dry_run='' actions=() command=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --name=* | --zone=* | --project=* | --type=* | --runtime=* | --run=* | --nfs=* | --worker=* | --poll=* | \
      --max_restarts=* | --slices=* | --only=* | --min_slices=*)
      [[ -n ${1#*=} ]] || fail "${1%%=*} needs a value"
      printf -v "$(sed 's/^--//; s/=.*//; q' <<<"$1")" '%s' "${1#*=}"
      ;;
    --spot | --queued | --dry_run) printf -v "${1#--}" yes ;;
    --help) usage && exit 0 ;;
    --) shift && command=("$@") && break ;;
    -*) fail "unknown option '$1' (values go after '='; --help lists the options)" ;;
    create | setup | check | start | wait | status | logs | stop | delete) actions+=("$1") ;;
    *) fail "unknown action '$1' (--help lists the actions)" ;;
  esac
  shift
done
[[ ${#actions[@]} -gt 0 ]] || fail "no action given (--help lists them)"
[[ -n $name ]] || fail "--name is required"
[[ -n $zone ]] || fail "--zone is required"
[[ $run =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "--run must be a plain name, got '$run'"
[[ $worker =~ ^[0-9]+$ ]] || fail "--worker must be a number, got '$worker'"
[[ $poll =~ ^[0-9]+$ ]] || fail "--poll must be a number of seconds, got '$poll'"
[[ $max_restarts =~ ^[0-9]{1,6}$ ]] || fail "--max_restarts must be a number, got '$max_restarts'"
[[ $slices =~ ^[1-9][0-9]{0,3}$ && $min_slices =~ ^([1-9][0-9]{0,3})?$ ]] ||
  fail "--slices and --min_slices must be numbers from 1 on, got '$slices' and '$min_slices'"
[[ ! $type =~ ^[0-9]+x ]] || fail "--type is that of one slice, got '$type': say --slices=${type%%x*} --type=${type#*x}"
[[ $slices -gt 1 || -z $only$min_slices ]] || fail "--only and --min_slices need --slices=2 or more"
nodes=("$name")
if ((slices > 1)); then
  queued=yes # nothing else makes slices that know of each other
  IFS=, read -ra chosen <<<"${only:-$(seq -s, 0 $((slices - 1)))}"
  for number in "${chosen[@]}"; do
    [[ $number =~ ^(0|[1-9][0-9]{0,3})$ && $number -lt $slices ]] ||
      fail "--only must be numbers from 0 to $((slices - 1)), got '$only'"
  done
  nodes=("${chosen[@]/#/$name-}")
  [[ -z $(printf '%s\n' "${nodes[@]}" | sort | uniq -d) ]] || fail "--only names a slice twice: '$only'"
fi
all=("${nodes[@]}")
[[ -z $nfs || $nfs == ?*:/* ]] || fail "--nfs must be SERVER:/DIR, got '$nfs'"
if [[ -z $runtime ]]; then
  # TPU software versions for PyTorch and JAX, as Cloud TPU's pages and examples use them.
  case $type in
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    *) runtime=tpu-ubuntu2204-base ;;
  esac
fi
for action in "${actions[@]}"; do
  [[ $action != create || -n $type ]] || fail "create needs --type, such as --type=v3-128"
  [[ $action != start || ${#command[@]} -gt 0 ]] || fail "start needs a command after --"
  [[ $action != wait || $max_restarts == 0 || ${#command[@]} -gt 0 ]] ||
    fail "wait with --max_restarts needs the command after --"
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
place=(--zone="$zone" ${project:+--project="$project"})
archive=${TMPDIR:-/tmp}/xla_fsdp-$$.tgz
trap 'rm -f "$archive"' EXIT

call() { # runs the command; with --dry_run prints it, as a line for a shell
  [[ -n $dry_run ]] || {
    "$@"
    return
  }
  local word line=()
  for word in "$@"; do
    [[ $word =~ ^[[:alnum:]_@%+=:,./~-]+$ ]] || word=${word@Q}
    line+=("$word")
  done
  echo "${line[*]}"
}

on() { # on TEXT NODE [WORKER]: runs TEXT there, or on all workers
  call gcloud compute tpus tpu-vm ssh "$2" "${place[@]}" --worker="${3:-all}" --command="$1"
}

each() { # each COMMAND...: COMMAND NODE on all slices at once; the exit code of one that failed
  local node pid pids=() code=0
  for node in "${nodes[@]}"; do
    if [[ -n $dry_run ]]; then "$@" "$node"; else "$@" "$node" & pids+=("$!"); fi
  done
  for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
  return "$code"
}

on_all() { # on_all ACTION ARGUMENT...: worker.sh on every worker
  each worker_sh "$@"
}

worker_sh() { # worker_sh ACTION ARGUMENT... NODE
  local text node=${*: -1}
  printf -v text '%q ' bash examples/pod/worker.sh "${@:1:$#-1}"
  on "cd ~/xla_fsdp && ${text% }" "$node"
}

start() { # of several slices, each is told which of how many it is, whatever its metadata says
  coordinator=COORDINATOR
  [[ $slices == 1 || -n $dry_run ]] || coordinator=$(gcloud compute tpus tpu-vm describe "${nodes[0]}" \
    "${place[@]}" --format='value(networkEndpoints[0].ipAddress)')
  each start_slice
}

start_slice() { # start_slice NODE
  local number=0 count=${#nodes[@]} said=()
  until [[ ${nodes[number]} == "$1" ]]; do number=$((number + 1)); done
  ((slices == 1)) || said=(env XLA_FSDP_SLICES="$count" MEGASCALE_NUM_SLICES="$count"
    MEGASCALE_SLICE_ID="$number" MEGASCALE_COORDINATOR_ADDRESS="$coordinator:8080" MEGASCALE_PORT=8080)
  worker_sh start "$run" "${said[@]}" "${command[@]}" "$1"
}

create() {
  local named=(--node-id="$name")
  ((slices == 1)) || named=(--node-count="$slices" --node-prefix="$name")
  [[ -z $only ]] || fail "create makes all slices of a queued resource: leave out --only"
  if [[ -n $queued ]]; then
    call gcloud compute tpus queued-resources create "$name" "${named[@]}" "${place[@]}" \
      --accelerator-type="$type" --runtime-version="$runtime" ${spot:+--spot}
    local state=''
    until [[ $state == ACTIVE ]]; do
      state=$(call gcloud compute tpus queued-resources describe "$name" "${place[@]}" \
        --format='value(state.state)')
      [[ -z $dry_run ]] || { echo "$state" && break; }
      [[ $state != FAILED && $state != SUSPEND* ]] || fail "queued resource $name is $state"
      [[ $state == ACTIVE ]] || sleep "$poll"
    done
  else
    call gcloud compute tpus tpu-vm create "$name" "${place[@]}" \
      --accelerator-type="$type" --version="$runtime" ${spot:+--spot}
  fi
}

delete() {
  if [[ -n $queued ]]; then
    call gcloud compute tpus queued-resources delete "$name" "${place[@]}" --force --quiet
  else
    call gcloud compute tpus tpu-vm delete "$name" "${place[@]}" --quiet
  fi
}

setup() {
  local node steps mount
  call git -C "$root" archive --format=tar.gz --output="$archive" HEAD
  for node in "${nodes[@]}"; do
    call gcloud compute tpus tpu-vm scp "$archive" "$node:xla_fsdp.tgz" "${place[@]}" --worker=all
  done
  steps='set -e; mkdir -p ~/xla_fsdp; tar -xzf ~/xla_fsdp.tgz -C ~/xla_fsdp; cd ~/xla_fsdp; '
  steps+='test -x .venv/bin/pip || python3 -m venv .venv || '
  steps+='{ sudo apt-get install -y -q python3-venv && python3 -m venv .venv; }; '
  steps+=".venv/bin/pip install -q -e '.[tpu,plan,examples]' gcsfs"
  each on "$steps"
  if [[ -n $nfs ]]; then
    mount='sudo apt-get install -y -q nfs-common && sudo mkdir -p /mnt/xla_fsdp && '
    mount+='{ mountpoint -q /mnt/xla_fsdp || '
    mount+="sudo mount -t nfs -o hard $(printf %q "$nfs") /mnt/xla_fsdp; } && sudo chmod a+rwx /mnt/xla_fsdp"
    each on "$mount"
  fi
}

check() { # what the options and COMMAND say is held against the slice
  local expected=() word
  [[ -z $type ]] || expected+=(--accelerator_type "$type" --runtime_version "$runtime")
  for word in "${command[@]}"; do
    [[ $word != --ckpt_dir=* ]] || expected+=(--ckpt_dir "${word#*=}")
  done
  local node code=0
  for node in "${nodes[@]}"; do
    call "${PYTHON:-$root/.venv/bin/python}" -m xla_fsdp.preflight --tpu "$node" --zone "$zone" \
      ${project:+--project "$project"} --python xla_fsdp/.venv/bin/python "${expected[@]}" || code=$?
  done
  return "$code"
}

ready() { # whether all slices are still there; says which are not, and leaves the others in "left"
  local node state
  left=()
  for node in "${nodes[@]}"; do
    state=$(gcloud compute tpus tpu-vm describe "$node" "${place[@]}" --format='value(state)') || state=GONE
    if [[ $state == READY ]]; then left+=("$node"); else echo "tpu_vm.sh: slice $node is $state" >&2; fi
  done
  ((${#left[@]} == ${#nodes[@]}))
}

replace() { # replace CODE: goes on with the slices that are left, or makes all again
  if [[ -n $min_slices ]] && ((${#left[@]} >= min_slices)); then
    nodes=("${left[@]}")
    echo "tpu_vm.sh: continuing with ${#nodes[@]} of $slices slices: ${nodes[*]}" >&2
    return
  fi
  [[ -n $type && -z $only ]] || return "$1" # nobody said what to make
  delete || true
  nodes=("${all[@]}")
  create && setup
}

watch() { # stops all workers as soon as one has failed: the others hang in a collective
  if [[ -n $dry_run ]]; then
    on_all status "$run"
    echo "# ... every $poll s, until all have exited 0; at the first other line:"
    on_all stop "$run"
    return
  fi
  local states bad code silent=0
  while true; do
    bad=''
    if states=$(on_all status "$run"); then
      silent=0
      bad=$(grep -E ' (exited ([1-9]|[0-9]{2,})|absent)$' <<<"$states" | head -n 1 || true)
    elif ((++silent == 3)) || ! ready; then
      bad='not every worker answers'
    fi
    if [[ -n $bad ]]; then
      echo "tpu_vm.sh: run '$run': $bad; stopping all workers" >&2
      on_all stop "$run" || true
      ready || return 75
      code=${bad##* }
      [[ $code =~ ^[0-9]+$ ]] || code=1
      return "$code"
    fi
    ((silent)) || grep -q ' running$' <<<"$states" || break
    sleep "$poll"
  done
  echo "run '$run': all workers are done"
}

watch_and_restart() { # code 2 is wrong usage, which would be the same again
  local attempt=0 code seconds
  while true; do
    code=0
    watch || code=$?
    [[ -z $dry_run && $code -ne 0 && $code -ne 2 ]] && ((attempt < max_restarts)) || return "$code"
    attempt=$((attempt + 1))
    seconds=$(bash "$root/examples/pod/back_off.sh" --seconds "$attempt")
    echo "tpu_vm.sh: run '$run' ended with $code; starting again in $seconds s, $attempt of $max_restarts" >&2
    sleep "$seconds"
    ready || replace "$code" || return
    start || return
  done
}

for action in "${actions[@]}"; do
  case $action in
    wait) watch_and_restart ;;
    status | stop) on_all "$action" "$run" ;;
    logs) on "cd ~/xla_fsdp && bash examples/pod/worker.sh follow $run" "${nodes[0]}" "$worker" ;;
    *) "$action" ;;
  esac
done
