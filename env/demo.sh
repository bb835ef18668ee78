#!/usr/bin/env bash
# From a bare machine to a trained model and its report: env/demo.sh [--venv DIR] [--in FOLDER] [--no-setup] [KEY=VALUE ...]
#
#   1. an environment with hpc_train, MPI and matplotlib
#   2. a corpus: the sources of Python's own library, which every machine here has
#   3. a tokenizer trained on it, and token files with a held-out part
#   4. the recipe `tiny` on 4 MPI ranks
#   5. the report
#
# All that it makes is in ./demo, or FOLDER/demo; delete that folder to begin anew. --no-setup takes the environment as it is.
# KEY=VALUE is a setting of the training, such as train.steps=80 for a shorter one.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=.venv
folder=$root
setup=yes
num_ranks=4
settings=()

while (($#)); do
    case $1 in
        --venv) venv=${2:?--venv needs a folder} && shift 2 ;;
        --in) folder=${2:?--in needs a folder} && shift 2 ;;
        --no-setup) setup=no && shift ;;
        [a-z]*=*) settings+=("$1") && shift ;;
        *) echo "usage: env/demo.sh [--venv DIR] [--in FOLDER] [--no-setup] [KEY=VALUE ...]" >&2 && exit 2 ;;
    esac
done
say() { printf '\ndemo: %s (after %d s)\n' "$*" "$SECONDS"; }
show() { # run a command, and show it first as the user would type it
    printf '  $ %s\n' "$*"
    "$@"
}

say "1/5 environment in $venv"
[[ $setup == no ]] || bash env/setup_venv.sh --venv "$venv" --extras report,local
[[ $folder == "$root" ]] || venv=$(cd "$venv" && pwd)
cd "$folder"
hpc_train=$venv/bin/hpc-train

say "2/5 corpus: the sources of Python's own library, without its tests"
"$venv/bin/python" - demo/sources <<'PY'
import shutil, sys, sysconfig
from pathlib import Path

library, copy = Path(sysconfig.get_path("stdlib")), Path(sys.argv[1])
left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
num_bytes = num_files = 0
for path in sorted(library.rglob("*.py")):
    place = path.relative_to(library)
    if left_out.isdisjoint(place.parts):
        (copy / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy / place)
        num_bytes, num_files = num_bytes + path.stat().st_size, num_files + 1
print(f"  {num_files} files, {num_bytes / 1e6:.1f} MB, from {library}")
PY

say "3/5 tokenizer and token files"
if [[ ! -e demo/tokenizer.json ]]; then
    show "$hpc_train" data tokenizer demo/sources --suffix .py --vocab-size 4096 --out demo/tokenizer.json
fi
if [[ ! -e demo/corpus.idx ]]; then
    show "$hpc_train" data build demo/sources --suffix .py --tokenizer demo/tokenizer.json \
        --heldout 0.02 --out demo/corpus
fi
show "$hpc_train" data show demo/corpus

say "4/5 training on $num_ranks MPI ranks"
run=demo/run-$(date +%Y-%m-%dT%H-%M-%S)
show "$hpc_train" run tiny -n "$num_ranks" --run-dir "$run" "${settings[@]}"

say "5/5 report"
show "$hpc_train" report "$run"

say "done"
cat <<TEXT

What to try next, with $hpc_train:

  run tiny -n 2 train.steps=600 optimizer.lr=1e-3    other settings: any key of the configuration
  run tiny -n $num_ranks --run-dir $run train.steps=400      go on from its checkpoint
  run tiny --print-config                            all that can be set
  data build YOUR_FILES --tokenizer demo/tokenizer.json --out demo/mine
  make cluster                                       a Slurm cluster of 8 nodes on this machine (root), then
  submit tiny -N 4 --ntasks-per-node=2 --follow      the same training as a Slurm job
TEXT
