#!/bin/bash
#SBATCH --job-name=llama-7b
#SBATCH --output=/scratch/me/runs/llama-7b/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=4:00:00
#SBATCH --exclusive
# Written by hpc-train 0.1.0. It holds all that the run needs: `sbatch submit.sh` submits it again.

stop() { echo "hpc-train: error: $1" >&2; exit 3; }

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

echo "hpc-train: the log of this job is $run_dir/logs/job.log"
exec >>"$run_dir/logs/job.log" 2>&1

export HPC_TRAIN_RUN_DIR=$run_dir
exec /opt/venv/bin/python -m hpc_train run "$run_dir/config.request.yaml" --run-dir "$run_dir"
