# One task a node, started by launch.stage_env; given to bash as an argument, so that no shared file is read for it.
#
#   prepare FOLDER NAME KIBIBYTES      FOLDER is ours alone; says "have" or "need"
#   unpack FOLDER NAME TAR             from TAR, which lies in FOLDER or is shared; says "have"
#
# What it says begins with a mark and the node. It never trusts a folder that somebody else could have written to.
set -u
umask 077
tell() { echo "hpc_train_stage $(hostname) $*"; }
fail() {
    tell "fail $*"
    exit 1
}

is_private() { [ -d "$1" ] && [ ! -L "$1" ] && [ -O "$1" ] && [ "$(stat -c %a "$1")" = 700 ]; }

# Whether a process of ours has files of a folder open as code, or a job took it less than an hour ago.
in_use() {
    [ -n "$(find "$1" -maxdepth 0 -mmin -60 2>/dev/null)" ] || grep -qsF "$1/" /proc/[0-9]*/maps
}

prepare() {
    folder=$1 name=$2 need=$3
    mkdir -m 700 "$folder" 2>/dev/null
    [ -e "$folder" ] || fail "$folder cannot be made: is ${folder%/*} there, and writable?"
    is_private "$folder" || fail "$folder is not ours alone ($(stat -c 'owner %U, mode %a' "$folder")), so it is not used"
    for old in "$folder"/env-* "$folder"/.new-*; do
        [ "$old" = "$folder/$name" ] || [ ! -e "$old" ] || in_use "$old" || rm -rf "$old"
    done
    if [ -x "$folder/$name/env/bin/python" ]; then
        touch "$folder/$name"
        tell have
        return
    fi
    free=$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$need" ] || fail "$folder has $((free / 1024)) MiB free, but $((need / 1024)) MiB are needed"
    tell need
}

unpack() {
    folder=$1 name=$2 tar=$3
    is_private "$folder" || fail "$folder is not ours alone"
    new=$(mktemp -d "$folder/.new-XXXXXX") || fail "$folder cannot be written"
    # shellcheck disable=SC2064
    trap "rm -rf '$new'" EXIT
    said=$(tar -xf "$tar" -C "$new" 2>&1) || fail "unpacking: $(echo "$said" | tail -n 1)"
    sed -i "s|@STAGED@|$folder/$name|" "$new/env/pyvenv.cfg" 2>/dev/null
    # Another job of ours may have been quicker.
    mv -T "$new" "$folder/$name" 2>/dev/null || [ -x "$folder/$name/env/bin/python" ] || fail "$folder/$name is in the way"
    touch "$folder/$name"
    case $tar in "$folder"/*) rm -f "$tar" ;; esac
    LD_LIBRARY_PATH=$folder/$name/base/lib "$folder/$name/env/bin/python" -I -c "import sys" || fail "the staged Python does not start"
    tell have
}

"$@"
