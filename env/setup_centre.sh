#!/usr/bin/env bash
# Install hpc_train for all users of a centre, without root and without internet, with modulefiles.
#
#   env/setup_centre.sh --prefix DIR --wheelhouse DIR [--version V] [--extras A,B] [--python PYTHON]
#       [--mpi-module NAME] [--libmpi FILE] [--depends NAME,NAME] [--module-dir DIR] [--scratch DIR]
#       [--system-site-packages]
#
# DIR/V is the install: an environment of its own, readable for all, writable for its owner alone, compiled.
#   --wheelhouse   the folder that env/make_wheelhouse.sh filled (default: DIR/wheelhouse)
#   --version      the module's version (default: that of the wheel)
#   --python       the Python to build on, which all users and nodes must be able to start (default: python3)
#   --mpi-module   the site's MPI module, which ours then loads
#   --libmpi       that MPI's libmpi.so, as ranks will load it (MPI4PY_LIBMPI)
#   --depends      further modules that ours loads first, such as the site's PyTorch. Load them now too:
#                  what they bring on PYTHONPATH is used and not installed again.
#   --module-dir   where the modulefiles go, as hpc_train/V.lua and hpc_train/V (default: DIR/modulefiles)
#   --scratch      a folder on each node's own disk for caches (default: /tmp)
#   --system-site-packages   see the packages of PYTHON itself, such as its torch
#
# A second call with the same arguments changes nothing; one with others writes the modulefiles anew. An install
# that users may be running is never altered: give another --version.
set -euo pipefail
umask 022

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix='' wheelhouse='' version='' extras='' python=python3 mpi_module='' libmpi='' depends='' module_dir=''
scratch=/tmp system=''

usage() { sed -n '/^#   env/,/^set/{/^set/d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
say() { printf 'setup_centre: %s\n' "$*"; }
die() {
    printf 'setup_centre: %s\n' "$*" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --prefix) prefix=${2:?--prefix needs a folder} && shift 2 ;;
        --wheelhouse) wheelhouse=${2:?--wheelhouse needs a folder} && shift 2 ;;
        --version) version=${2:?--version needs a name} && shift 2 ;;
        --extras) extras=${2?--extras needs a list} && shift 2 ;;
        --python) python=${2:?--python needs a program} && shift 2 ;;
        --mpi-module) mpi_module=${2:?--mpi-module needs a name} && shift 2 ;;
        --libmpi) libmpi=${2:?--libmpi needs a file} && shift 2 ;;
        --depends) depends=${2:?--depends needs a list} && shift 2 ;;
        --module-dir) module_dir=${2:?--module-dir needs a folder} && shift 2 ;;
        --scratch) scratch=${2:?--scratch needs a folder} && shift 2 ;;
        --system-site-packages) system=yes && shift ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && die "unknown argument: $1" ;;
    esac
done

# Can it be done? Nothing is written before all of this holds.

[[ -n $prefix ]] || { usage >&2 && die "--prefix DIR is missing: where shall it be installed?"; }
prefix=$(realpath -m -- "$prefix")
wheelhouse=$(realpath -m -- "${wheelhouse:-$prefix/wheelhouse}")
module_dir=$(realpath -m -- "${module_dir:-$prefix/modulefiles}")
plain() { # these words go into Lua, Tcl and shell texts, so they are kept plain
    [[ $2 =~ ^[A-Za-z0-9._/+@:,-]*$ ]] || die "$1 $2: only letters, digits and . _ / + @ : - can be used here"
}
plain --prefix "$prefix" && plain --module-dir "$module_dir" && plain --version "$version" && plain --libmpi "$libmpi"
plain --mpi-module "$mpi_module" && plain --depends "$depends" && plain --scratch "$scratch"
[[ $scratch == /* ]] || die "--scratch $scratch is not an absolute path"
[[ $version != */* ]] || die "--version $version has a slash in it"

[[ -d $wheelhouse ]] || die "there is no folder $wheelhouse. Make it by env/make_wheelhouse.sh --out DIR, where there" \
    "is internet, and give it by --wheelhouse."
wheels=("$wheelhouse"/hpc_train-*.whl)
[[ -f ${wheels[0]} ]] || die "$wheelhouse has no hpc_train-*.whl: it was not made by env/make_wheelhouse.sh"
((${#wheels[@]} == 1)) || die "$wheelhouse has several wheels of hpc_train: ${wheels[*]##*/}. Leave one."
wheel=${wheels[0]}
if [[ -f $wheelhouse/SHA256SUMS ]]; then
    (cd "$wheelhouse" && sha256sum --quiet --strict --check SHA256SUMS) ||
        die "$wheelhouse was damaged on its way here (see above). Copy it again."
fi
[[ -n $version ]] || version=$(basename "$wheel" | cut -d- -f2)

if [[ -n $libmpi ]]; then
    [[ $libmpi == /* && -f $libmpi ]] || die "--libmpi $libmpi is no file with an absolute path. It is the MPI's" \
        "libmpi.so, libmpi.so.12 or libmpi.so.40."
    [[ $(head -c 4 "$libmpi" | tail -c 3) == ELF ]] ||
        die "--libmpi $libmpi is no shared library (a wheel's libmpi.so is a text: give the one with a number)"
fi
[[ -z $mpi_module || -n $libmpi ]] || die "--mpi-module $mpi_module without --libmpi: then another MPI could be" \
    "loaded than the module's. After \`module load $mpi_module\`, look for lib/libmpi.so in its folder."

exe=$(command -v "$python") || die "there is no program $python. On a centre: module avail python; then --python."
"$exe" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
    die "$python is no Python 3.11, 3.12 or 3.13 ($("$exe" --version 2>&1)). Give another by --python."
barred() { # the first folder above a file that neither its group nor others may enter
    local folder=$1
    while folder=$(dirname "$folder") && [[ $folder != / ]]; do
        [[ ! -e $folder ]] || (($(stat -L -c '8#%a & 8#11' "$folder"))) || { echo "$folder" && return; }
    done
}
# A venv is built on the Python that it was made from.
base=$("$exe" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))')
closed=$(barred "$base")
[[ -z $closed ]] || die "the Python $base lies under $closed, which other users may not enter ($(stat -c %A "$closed"))," \
    "so they could not start it. Give one that all can read by --python, such as the site's module."
closed=$(barred "$prefix/x")
[[ -z $closed ]] || die "--prefix $prefix: other users may not enter $closed ($(stat -c %A "$closed")). chmod a+x it, or" \
    "choose another folder."
mkdir -p "$prefix" "$module_dir/hpc_train" 2>/dev/null || true
[[ -w $prefix ]] || die "$prefix cannot be written by $(id -un)"
[[ -w $module_dir/hpc_train ]] || die "$module_dir/hpc_train cannot be written by $(id -un)"

# The environment

target=$prefix/$version
stamp=$target/.hpc_train
state=$(printf '%s\n' "$(sha256sum <"$wheel")" "$wheelhouse"/*.whl "$base" "$extras" "$system" | sha256sum | cut -d' ' -f1)
half=$prefix/.$version.unfinished # says that what lies in the target is ours, and not whole
if [[ -f $stamp && $(<"$stamp") == "$state" ]]; then
    say "$target is there already, made from the same things"
elif [[ -e $target && ! -e $half ]]; then
    die "$target is there already and was made from other things. Users may be running it, so it is left as it is:" \
        "give another --version, or remove it."
else
    start=$SECONDS
    rm -rf "$target" && touch "$half"
    say "making $target on $base ($("$base" --version))"
    "$base" -m venv --without-pip ${system:+--system-site-packages} "$target" ||
        die "python -m venv failed. The Python needs its module venv (Debian: python3-venv)."
    pips=("$wheelhouse"/pip-*.whl)
    if "$exe" -m pip --python "$target/bin/python" --version >/dev/null 2>&1; then
        pip=("$exe" -m pip --python "$target/bin/python")
    elif [[ -f ${pips[-1]} ]]; then
        pip=("$target/bin/python" "${pips[-1]}/pip") # a wheel of pip runs as it is
    else
        die "$exe has no pip of 22.3 or later, and $wheelhouse has none. Add one: pip download --no-deps pip"
    fi
    offline=("${pip[@]}" --disable-pip-version-check --quiet install --no-index --find-links "$wheelhouse")
    say "installing ${wheel##*/}${extras:+ with extras $extras} from $wheelhouse, offline"
    # Installed, not linked: nothing outside is needed. Compiled now, since no user can do it later.
    env -u PIP_TARGET -u PIP_USER -u PIP_PREFIX PYTHONNOUSERSITE=1 "${offline[@]}" --compile \
        "$wheel${extras:+[$extras]}" ||
        die "something is missing in $wheelhouse (see above). Make it with the same Python release and the same" \
            "--extras, or load the modules that bring it and name them by --depends."
    chmod -R a+rX,go-w "$target"
    printf '%s\n' "$state" >"$stamp"
    rm -f "$half"
    say "installed in $((SECONDS - start)) s: $(du -sh "$target" | cut -f1), $(find "$target" -type f | wc -l) files"
fi

# What the ranks will find

if [[ -z $libmpi && ! -e $target/lib/libmpi.so.40 ]]; then
    say "note: no --libmpi, and no MPI in the environment (--extras local): ranks take what the system's folders have"
elif [[ -n $libmpi ]]; then
    MPI4PY_LIBMPI=$libmpi "$target/bin/python" -c '
import os
from hpc_train.cluster.mpi_site import SPOKEN, find_mpi_library
print("setup_centre: the MPI library is", SPOKEN[find_mpi_library(os.environ).kind])'
fi

# The modulefiles

fill() { # fill TEMPLATE TARGET LOAD-LINE SETENV-LINE CACHE-LINE, the last three as printf formats
    local text depends_lines="" libmpi_line="" cache_lines="" name variable
    text=$(<"$1")
    for name in ${mpi_module} ${depends//,/ }; do
        # shellcheck disable=SC2059 # the format is ours
        depends_lines+=$(printf "$3" "$name")$'\n'
    done
    # shellcheck disable=SC2059
    [[ -z $libmpi ]] || libmpi_line=$(printf "$4" MPI4PY_LIBMPI "$libmpi")$'\n'
    while read -r variable name; do
        # shellcheck disable=SC2059
        cache_lines+=$(printf "$5" "$variable" "$name")$'\n'
    done <<<"$caches"
    text=${text//@DEPENDS@/"$depends_lines"} && text=${text//@LIBMPI@/"$libmpi_line"}
    text=${text//@CACHES@/"${cache_lines%$'\n'}"} && text=${text//@ROOT@/"$target"}
    text=${text//@SCRATCH@/"$scratch"} && text=${text//@VERSION@/"$version"}
    if [[ -f $2 && $(<"$2") == "$text" ]]; then
        say "unchanged: $2"
        return
    fi
    printf '%s\n' "$text" >"$2.new" && chmod 644 "$2.new" && mv "$2.new" "$2"
    say "written: $2"
}
caches=$("$target/bin/python" -c '
from hpc_train.cluster.scratch import CACHE_VARIABLES
print("\n".join(f"{variable} {name}" for variable, name in CACHE_VARIABLES.items()))')
fill "$here/hpc_train.lua.in" "$module_dir/hpc_train/$version.lua" \
    'depends_on("%s")' 'setenv("%s", "%s")' 'cache("%s", "%s")'
fill "$here/hpc_train.tcl.in" "$module_dir/hpc_train/$version" \
    'hpc_train_needs {%s}' 'setenv %s {%s}' 'hpc_train_cache %s %s'
say "users type: module use $module_dir; module load hpc_train/$version"
