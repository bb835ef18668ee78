#!/bin/bash
#SBATCH --job-name='two words'
#SBATCH --output='/scratch/a b/100%%/runs/llama-7b/slurm-%A_%a.out'
#SBATCH --open-mode=append
#SBATCH --ntasks=2
#SBATCH --array=0-3%2
#SBATCH --comment='it'"'"'s a "test" of $HOME'
# Written by hpc-train 0.1.0. It holds all that the run needs: `sbatch submit.sh` submits it again.
# sbatch was also given: --nice=100 --mail-user 'me and you'

stop() { echo "hpc-train: error: $1" >&2; exit 3; }

# Without --run-dir the folder has the name of the first job that uses it, which a requeued job keeps.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
job=${job:-$SLURM_JOB_ID}
[ -n "$job" ] || stop "this script is for sbatch"
run_dir='/scratch/a b/100%/runs/llama-7b'/"$job"

# The folder is moved into place whole, by this job or by `hpc-train submit`, whoever is first. In a folder
# that is there already, each file is replaced whole.
mkdir -p "$(dirname "$run_dir")" || stop "the folder above $run_dir cannot be made"
new=$(mktemp -d "$run_dir.new.XXXXXX") || stop "no folder can be made beside $run_dir"
mkdir "$new/logs" && cp "$0" "$new/submit.sh" || stop "$new cannot be written"
cat >"$new/config.request.yaml" <<'END_OF_FILE_2' || stop "$new cannot be written"
name: x
END_OF_FILE
@PYTHON@
END_OF_FILE_2
cat >"$new/plan.request.json" <<'END_OF_FILE_2' || stop "$new cannot be written"
{"world_size": 32}
END_OF_FILE_2
chmod 755 "$new"
if ! mv -T "$new" "$run_dir" 2>/dev/null; then
    mkdir -p "$run_dir/logs" && mv -f "$new"/*.* "$run_dir" || stop "$run_dir cannot be written"
    rm -rf "$new"
fi

echo "hpc-train: the log of this job is $run_dir/logs/job.log"
exec >>"$run_dir/logs/job.log" 2>&1

# A batch shell is no login shell, so `module` may have to be defined first.
for file in /etc/profile.d/lmod.sh /etc/profile.d/modules.sh /usr/share/modules/init/bash; do
    type module >/dev/null 2>&1 || { [ -r "$file" ] && . "$file"; }
done
module load openmpi/5.0 || stop 'the module openmpi/5.0 cannot be loaded'
module load 'it'"'"'s' || stop 'the module it'"'"'s cannot be loaded'

export HPC_TRAIN_RUN_DIR=$run_dir
exec '/opt/my venv/bin/python' -m hpc_train run "$run_dir/config.request.yaml" --run-dir "$run_dir" --mpi pmix
