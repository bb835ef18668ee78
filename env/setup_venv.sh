#!/usr/bin/env bash
# Make a Python environment with hpc_train in it, editable: env/setup_venv.sh [--venv DIR] [--extras A,B]
#
# torch comes from where it is best had:
#   1. an installed torch (2.8 or later) that python3 can import is used as it is: a centre's torch is built
#      for its CUDA, NCCL and MPI, and is gigabytes. The environment then sees the system's packages.
#   2. with an NVIDIA GPU, PyPI's torch, which is a CUDA build.
#   3. without one, a CPU build: what pip's own configuration offers for the tested version, else the PyTorch
#      project's CPU index.
# Sizes are said before a download. A second call with nothing changed returns at once.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
venv=$root/.venv
extras=
tested_torch=2.13.0
oldest_torch=2.8
cpu_index=https://download.pytorch.org/whl/cpu

usage() {
    echo "usage: env/setup_venv.sh [--venv DIR] [--extras NAME,NAME]"
    echo "extras: local, cuda12, cuda13, debug, hdfs, libhdfs, s3, sftp, report, tensorboard, docs, test (setup.cfg says what each is)"
}
say() { printf 'setup_venv: %s\n' "$*"; }
die() {
    printf 'setup_venv: %s\n' "$*" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --venv) venv=${2:?--venv needs a folder} && shift 2 ;;
        --extras) extras=${2?--extras needs a list} && shift 2 ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && die "unknown argument: $1" ;;
    esac
done
for extra in ${extras//,/ }; do
    # The names in setup.cfg's list of extras begin its unindented lines.
    sed '1,/^\[options.extras_require\]/d; /^\[/,$d' "$root/setup.cfg" | grep -q "^$extra =" ||
        die "there is no extra named $extra; see --help"
done
[[ $venv == /* ]] || venv=$PWD/$venv
python=$venv/bin/python

# Nothing to do?

stamp=$venv/.hpc_train # what it was made from, and on the last line its extras
state=$(
    cat "$root/setup.cfg" "$root/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1
    printf '%s\n' "$root"
)
installed=
if [[ -x $python && -f $stamp && $(sed '$d' "$stamp") == "$state" ]]; then
    installed=$(sed -n '$p' "$stamp")
fi
# Extras that are there already stay: `make demo` after `make test` has nothing to do.
# shellcheck disable=SC2086 # lists of words
all=$(printf '%s\n' ${installed//,/ } ${extras//,/ } | sort -u | paste -sd,)
if [[ -n $installed && $all == "${installed#,}" ]] &&
    "$python" -c 'import hpc_train, importlib.util; assert importlib.util.find_spec("torch")' 2>/dev/null; then
    say "$venv is ready (extras: $all)"
    exit 0
fi
extras=$all

# Find a Python. A name can be there and not work (pyenv's shims), so each is asked.

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
has_torch() {
    "$1" - "$oldest_torch" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
wanted, found = ([int(part) for part in text.split(".")[:2]] for text in (sys.argv[1], version("torch")))
sys.exit(found < wanted)
PY
}
in_venv() { "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; }
base=
for name in python3 python3.11 python3.12 python3.13; do
    fits "$name" || continue
    [[ -n $base ]] || base=$(command -v "$name")
    # A later one is taken only for the sake of its torch.
    if has_torch "$name"; then base=$(command -v "$name") && break; fi
done
if [[ -z $base ]]; then
    die "no Python 3.11, 3.12 or 3.13 found (python3 is $(python3 --version 2>&1 || echo missing))." \
        "On a centre: module avail python. Elsewhere: apt-get install python3 python3-venv."
fi
rm -f "$stamp"
start=$SECONDS

# The environment itself

say "using $base ($("$base" --version))"
options=()
# An environment made from within another one does not see that one's packages, only the system's.
if has_torch "$base" && ! in_venv "$base"; then
    say "torch $("$base" -c 'from importlib.metadata import version; print(version("torch"))') is installed and" \
        "is used as it is"
    options=(--system-site-packages)
fi
if [[ ! -x $python ]]; then
    say "making $venv"
    "$base" -m venv "${options[@]}" "$venv" ||
        die "python -m venv failed. On Debian and Ubuntu: apt-get install python3-venv"
fi
# Errors only: mirrors make pip warn a lot. Modules are compiled at the end, on all cores.
install() { "$python" -m pip install -qq --no-compile --disable-pip-version-check --progress-bar off "$@"; }
say "pip and setuptools"
install --upgrade pip 'setuptools>=77'

# torch

report=
ask() { # leave in $report what pip would fetch for these arguments; fails if pip finds nothing
    report=$(install --dry-run --ignore-installed --report - "$@" 2>/dev/null)
}
size() { "$python" "$here/download_size.py" <<<"$report"; }
cpu_torch() { # install a CPU build for these arguments of pip, size first
    ask "$@" || return
    say "torch: $(size)"
    if "$python" "$here/download_size.py" --is-cuda <<<"$report"; then
        say "that is a CUDA build. It runs on a CPU as well, but is large: interrupt (Ctrl-C) if it is too much," \
            "install a CPU build of torch for $base, and run this again"
        sleep 5
    fi
    install "$@"
}
if has_torch "$python"; then
    :
elif command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus >/dev/null 2>&1; then
    say "this machine has an NVIDIA GPU: taking a CUDA build of torch, about 3 GB"
    install "torch>=$oldest_torch"
elif curl --silent --head --fail --max-time 5 --output /dev/null "$cpu_index/torch/" 2>/dev/null; then
    say "no NVIDIA GPU here: taking a CPU build of torch from the PyTorch project's CPU index, about 200 MB"
    cpu_torch "torch==$tested_torch" --index-url "$cpu_index" ||
        cpu_torch "torch>=$oldest_torch" --index-url "$cpu_index"
else
    # Where a mirror has no separate metadata, pip can only answer by fetching; it then keeps what it fetched.
    say "no NVIDIA GPU here, and the PyTorch project's CPU index is out of reach: asking pip for torch $tested_torch"
    cpu_torch "torch==$tested_torch" || cpu_torch "torch>=$oldest_torch" ||
        die "pip finds no torch for $base: see what \"$python -m pip install torch\" says"
fi

# hpc_train and its extras

say "hpc_train, editable, with extras: ${extras:-none}"
# No build isolation: setuptools is there, and an isolated build would fetch it again.
install --no-build-isolation --editable "$root${extras:+[$extras]}"
if [[ ,$extras, == *,test,* ]]; then
    # Without what it asks for: only its dataset reader and writer are used, to compare ours with.
    say "megatron-core, for comparison in tests"
    install --no-deps 'megatron-core>=0.14' ||
        say "megatron-core is not to be had here; the tests that compare with it are skipped"
    # 14 MB, 60 MB on disk. Of what it asks for only regex is not here already and needed by its Llama and GPT-2.
    say "transformers, for comparison in tests"
    install --no-deps 'transformers>=5' regex ||
        say "transformers is not to be had here; the tests that compare with it are skipped"
    # In a folder of its own: its mpirun and libmpi would take the place of Open MPI's.
    say "MPICH, to test against another brand of MPI"
    install --no-deps --ignore-installed --prefix "$venv/opt/mpich" mpich ||
        say "MPICH is not to be had here; the tests that need it are skipped"
fi

# Python compiles a module when it is first imported, which here is now: what we use, not the many thousand
# modules that come with it, and also where the user's environment forbids to write compiled files.
say "compiling the modules that are used"
# shellcheck disable=SC2086 # a list of words
"$python" - ${extras//,/ } <<'PY'
import importlib, os, sys, warnings

os.environ["MPI4PY_RC_INITIALIZE"] = "0"
sys.dont_write_bytecode = False
warnings.simplefilter("ignore")
# setuptools first: it refuses to be imported after distutils.
used = "setuptools.build_meta torch torch.distributed torch.distributed.device_mesh torch.distributed.checkpoint torch.optim torch.utils.data"
used += " torch.distributed.checkpoint.state_dict numpy numba pandas pydantic submitit tokenizers yaml mpi4py.MPI nvtx pip"
for_extra = {
    "report": "matplotlib.pyplot",
    "tensorboard": "torch.utils.tensorboard",
    "test": "pytest pytest_timeout hypothesis matplotlib.pyplot torch.utils.tensorboard"
    " megatron.core.datasets.indexed_dataset transformers.models.llama.modeling_llama"
    " transformers.models.gpt2.modeling_gpt2",
}
for name in " ".join([used, *(for_extra.get(extra, "") for extra in sys.argv[1:])]).split():
    try:
        importlib.import_module(name)
    except Exception as error:
        # An MPI that only its modulefile makes loadable, an extra that is not for this machine: not a fault here.
        reason = f"{error}\n".splitlines()[0]
        print(f"setup_venv: note: {name} does not import here: {reason}")
PY

printf '%s\n' "$state" "${extras:-,}" >"$stamp"
say "$venv is ready after $((SECONDS - start)) s: source $venv/bin/activate"
