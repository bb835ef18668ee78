#!/usr/bin/env bash
# Collect hpc_train and all that it needs as files, on a machine with internet, for env/setup_centre.sh.
#
#   env/make_wheelhouse.sh --out DIR [--python PYTHON] [--extras A,B] [--index-url URL] [--only-hpc-train]
#
# PYTHON must be of the release, and this machine of the processor type, that the centre has.
# pip's own settings hold: PIP_CONSTRAINT=FILE with `torch==2.13.0` in it chooses that torch.
# --index-url: another index for torch and the rest, such as the PyTorch project's CPU index.
# --only-hpc-train: our wheel alone, for a centre whose own Python or modules bring torch and the rest.
set -euo pipefail
umask 022

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
out='' python=python3 extras='' index='' only_ours=''

usage() { sed -n '/^#   env/,/^set/{/^set/d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
say() { printf 'make_wheelhouse: %s\n' "$*"; }
die() {
    printf 'make_wheelhouse: %s\n' "$*" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --out) out=${2:?--out needs a folder} && shift 2 ;;
        --python) python=${2:?--python needs a program} && shift 2 ;;
        --extras) extras=${2?--extras needs a list} && shift 2 ;;
        --index-url) index=${2:?--index-url needs an address} && shift 2 ;;
        --only-hpc-train) only_ours=yes && shift ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && die "unknown argument: $1" ;;
    esac
done
[[ -n $out ]] || { usage >&2 && die "--out DIR is missing: where shall the files go?"; }
[[ -f $root/setup.cfg ]] ||
    die "there is no setup.cfg in $root, so the wheel cannot be built. Use the script of a source tree."
for extra in ${extras//,/ }; do
    sed '1,/^\[options.extras_require\]/d; /^\[/,$d' "$root/setup.cfg" | grep -q "^$extra =" ||
        die "there is no extra named $extra in setup.cfg"
done
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
    die "$python is no Python 3.11, 3.12 or 3.13 that works. Give one by --python."
"$python" -m pip --version >/dev/null 2>&1 || die "$python has no pip: $python -m ensurepip --user"
mkdir -p "$out" 2>/dev/null || true
[[ -d $out && -w $out ]] || die "the folder $out cannot be written"
out=$(cd "$out" && pwd)

pip=("$python" -m pip --disable-pip-version-check --quiet)
# A copy, since setuptools writes into the tree that it builds.
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
tar -C "$root" -cf - setup.cfg pyproject.toml README.md LICENSE hpc_train slurm env | tar -C "$work/source" -xf -
isolation=()
# With a setuptools at hand nothing need be fetched to build.
"$python" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null &&
    isolation=(--no-build-isolation)
say "building the wheel of hpc_train"
"${pip[@]}" wheel --no-deps "${isolation[@]}" --wheel-dir "$work/wheels" "$work/source" ||
    die "the wheel could not be built; see above"
wheel=$(basename "$work"/wheels/hpc_train-*.whl)
rm -f "$out"/hpc_train-*.whl
mv "$work/wheels/$wheel" "$out"
if [[ -z $only_ours ]]; then
    say "fetching what it needs (with torch this takes hundreds of megabytes, a CUDA build gigabytes)"
    "${pip[@]}" download --only-binary :all: --dest "$out" --find-links "$out" ${index:+--extra-index-url "$index"} \
        pip "$out/$wheel${extras:+[$extras]}" ||
        # A few packages come as sources only; they are built here, not at the centre.
        "${pip[@]}" wheel --wheel-dir "$out" --find-links "$out" ${index:+--extra-index-url "$index"} \
            pip "$out/$wheel${extras:+[$extras]}" ||
        die "pip cannot get all that $wheel needs; see above"
fi
(cd "$out" && sha256sum -- *.whl >SHA256SUMS)
say "$out has $(find "$out" -name '*.whl' | wc -l) wheels, $(du -sh "$out" | cut -f1). Bring it to the centre, then there:"
say "    env/setup_centre.sh --prefix DIR --wheelhouse $out${extras:+ --extras $extras}"
