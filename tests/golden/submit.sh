#!/bin/bash
#SBATCH --job-name=llama-7b
#SBATCH --output=/scratch/me/runs/llama-7b/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=4:00:00
#SBATCH --exclusive
#SBATCH --requeue
# Written by hpc-train 0.1.0. It holds all that the run needs: `sbatch submit.sh` submits it again.

new=
stop() { [ -z "$new" ] || rm -rf "$new"; echo "hpc-train: error: $1" >&2; exit 3; }

HPC_TRAIN_STOP_SIGNAL=USR2
HPC_TRAIN_REQUEUE=interrupted
HPC_TRAIN_MAX_REQUEUES=100

# Passes signals on to a program, and puts the job back into the queue by its exit code.
hpc_train_pid=
hpc_train_held=()
declare -gA hpc_train_helper=()
hpc_train_signals=0
hpc_train_outcome=
export -n HPC_TRAIN_REQUEUE_FILE

# From here on no signal ends this shell; each is kept for the program that hpc_train_run starts.
hpc_train_catch() {
    local signal
    for signal in TERM INT HUP USR1 USR2 "${HPC_TRAIN_STOP_SIGNAL:-USR2}"; do
        # shellcheck disable=SC2064
        trap "hpc_train_pass_on $signal" "$signal"
    done
}

# Starts a program and waits for it. Returns its exit code, or the one in outcome.json where a container or a wrapper
# around it lost that.
hpc_train_run() {
    local signal signals now code=127
    hpc_train_catch
    hpc_train_outcome=$(hpc_train_look)
    # Python takes a while to set its handlers; until then these would end it.
    (trap '' USR1 USR2 "${HPC_TRAIN_STOP_SIGNAL:-USR2}" && exec "$@") &
    hpc_train_pid=$!
    for signal in ${hpc_train_held[@]+"${hpc_train_held[@]}"}; do
        hpc_train_pass_on "$signal"
    done
    hpc_train_held=()
    # A signal ends `wait`, not the program. 127 comes from a bash that gave the program's code once already.
    while true; do
        signals=$hpc_train_signals
        wait "$hpc_train_pid" && now=0 || now=$?
        [ "$now" = 127 ] || code=$now
        [ "$signals" != "$hpc_train_signals" ] || break
    done
    hpc_train_pid=
    case $code in
        2 | 3 | 4 | 5 | 10 | 11 | 12) ;;
        *) [ "$(hpc_train_look)" = "$hpc_train_outcome" ] || code=$(hpc_train_written "$code") ;;
    esac
    return "$code"
}

# Puts the job back into the queue if the exit code asks for it and nothing forbids it, and says what it did.
hpc_train_requeue() {
    local id=${SLURM_JOB_ID:-} most=${HPC_TRAIN_MAX_REQUEUES:-100} restarts=${SLURM_RESTART_COUNT:-0} why again
    # The last task of an array has the array's own id as its job id, by which all tasks would be requeued.
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    case $1 in
        10) ;;
        1 | 129 | 1[3-9]? | 2[0-5]?) [ "${HPC_TRAIN_REQUEUE:-}" = failed ] || return 0 ;;
        *) return 0 ;;
    esac
    again="To go on: hpc-train submit ... --run-dir $(printf %q "${HPC_TRAIN_RUN_DIR:-DIR}"), or --chain K from the start"
    why=$(hpc_train_why_not "$id" "$restarts" "$most" "$again")
    # Slurm ends this script as soon as the job is in the queue again.
    trap '' TERM INT HUP
    if [ -z "$why" ]; then
        if [ -n "${HPC_TRAIN_REQUEUE_FILE:-}" ]; then
            echo "${HPC_TRAIN_RUN_DIR:-}" >"$HPC_TRAIN_REQUEUE_FILE" || why="$HPC_TRAIN_REQUEUE_FILE cannot be made"
        else
            scontrol requeue "$id" || why="Slurm refused; --no-requeue forbids it, and so do some sites. $again"
        fi
    fi
    if [ -z "$why" ]; then
        echo "hpc-train: exit code $1, so job $id goes back into the queue: restart $((restarts + 1)) of $most at most"
    else
        echo "hpc-train: exit code $1, but the job is not put back into the queue: $why"
    fi
}

# A reason against a requeue, or nothing.
hpc_train_why_not() {
    local state
    case ${HPC_TRAIN_REQUEUE:-interrupted} in
        never) echo "launch.requeue=never. $4" && return ;;
        chain) echo "the next job of the chain goes on" && return ;;
    esac
    if [ -z "$1" ]; then
        echo "this is no Slurm job. $4"
    elif [ "$2" -ge "$3" ]; then
        echo "it was $2 times already, and launch.max_requeues=$3. $4"
    elif [ -z "${HPC_TRAIN_REQUEUE_FILE:-}" ] && ! command -v scontrol >/dev/null; then
        echo "scontrol is not on PATH, as in most containers. The exit code and outcome.json tell a script outside"
    elif ! state=$(hpc_train_state "$1"); then
        echo "squeue does not say whether it is being cancelled. $4"
    else
        case $state in
            # At its time limit Slurm ends a job, and lets it go back all the same.
            RUNNING* | *TimeLimit) ;;
            *) echo "Slurm itself is ending it (${state:-it has left the queue})" ;;
        esac
    fi
}

# RUNNING, or another state of a job that Slurm is about to end, and a reason. The controller may be busy for a while.
hpc_train_state() {
    squeue --noheader --jobs "$1" --format "%T %r" && return
    sleep "${HPC_TRAIN_PATIENCE_S:-10}"
    squeue --noheader --jobs "$1" --format "%T %r"
}

hpc_train_pass_on() {
    hpc_train_signals=$((hpc_train_signals + 1))
    if [ -z "$hpc_train_pid" ]; then
        hpc_train_held+=("$1")
        return
    fi
    # Slurm may send one signal to this shell and to what started it, which sends it again.
    if [ -n "${hpc_train_helper[$1]:-}" ] && kill -0 "${hpc_train_helper[$1]}" 2>/dev/null; then
        return
    fi
    (
        trap '' TERM INT HUP USR1 USR2
        # A program that was started just now is still a copy of this shell.
        sleep 0.2
        case $1 in
            TERM | HUP) ;;
            *) until hpc_train_handles "$1"; do sleep 0.2; done ;;
        esac
        kill -s "$1" "$hpc_train_pid"
    ) 2>/dev/null &
    hpc_train_helper[$1]=$!
}

# Whether the program has a handler for a signal, or is gone.
hpc_train_handles() {
    local caught
    caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$hpc_train_pid/status")
    [ -z "$caught" ] || [ $((0x$caught >> ($(kill -l "$1") - 1) & 1)) = 1 ]
}

# Which outcome.json is there: an earlier start's says nothing about this one.
hpc_train_look() {
    stat -c %i.%y "${HPC_TRAIN_RUN_DIR:-/dev/null}/outcome.json" 2>/dev/null || echo none
}

hpc_train_written() {
    local code
    code=$(sed -n 's/^ *"exit_code": *\([0-9][0-9]*\),*$/\1/p' "$HPC_TRAIN_RUN_DIR/outcome.json" 2>/dev/null) || code=
    echo "${code:-$1}"
}

hpc_train_catch

# Without --run-dir the folder has the name of the first job that uses it, which a requeued job keeps.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
job=${job:-$SLURM_JOB_ID}
[ -n "$job" ] || stop "this script is for sbatch"
run_dir=/scratch/me/runs/llama-7b/"$job"

# The folder is moved into place whole, by this job or by `hpc-train submit`, whoever is first. In a folder
# that is there already, each file is replaced whole.
mkdir -p "$(dirname "$run_dir")" || stop "the folder above $run_dir cannot be made"
new=$(mktemp -d "$run_dir.new.XXXXXX") || stop "no folder can be made beside $run_dir"
mkdir "$new/logs" && cp "$0" "$new/submit.sh" || stop "$new cannot be written"
cat >"$new/config.request.yaml" <<'END_OF_FILE' || stop "$new cannot be written"
name: llama-7b
note: '$HOME `date`'
END_OF_FILE
cat >"$new/plan.request.json" <<'END_OF_FILE' || stop "$new cannot be written"
{"world_size": 32}
END_OF_FILE
chmod 755 "$new"
if ! mv -T "$new" "$run_dir" 2>/dev/null; then
    mkdir -p "$run_dir/logs" && mv -f "$new"/*.* "$run_dir" || stop "$run_dir cannot be written"
    rm -rf "$new"
fi
new=

echo "hpc-train: the log of this job is $run_dir/logs/job.log"
exec >>"$run_dir/logs/job.log" 2>&1

export HPC_TRAIN_RUN_DIR=$run_dir
hpc_train_run /opt/venv/bin/python -m hpc_train run "$run_dir/config.request.yaml" --run-dir "$run_dir"
code=$?
hpc_train_requeue "$code"
exit "$code"
