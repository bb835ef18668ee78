#!/usr/bin/env bash
# Install the Debian or Ubuntu packages that the Slurm, MPI, module, InfiniBand, HDFS and SFTP tests and `make cluster` need.
# Does nothing when they are there. Without root it names the command for an administrator and succeeds:
# the tests that need the packages are then skipped and counted.
set -euo pipefail

packages=(slurm-wlm libpmix-dev munge iproute2 lmod procps libopenmpi3 tcl ibsim-utils infiniband-diags)
# For a real HDFS (env/setup_hadoop.sh): what Hadoop needs besides its own classes, and a Java that runs it.
packages+=(libjersey1-core-java libjersey1-server-java libjersey1-servlet-java libjsr311-api-java)
# For an HDFS that asks for Kerberos tickets.
packages+=(krb5-kdc krb5-admin-server krb5-user)
# A real SFTP server, which is started by the tests alone.
packages+=(openssh-server)

root=$(dirname "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)")

say() { printf 'setup_system: %s\n' "$*"; }

# Hadoop 2.7 runs on Java 8 to 23; what is there is used.
fitting_java() {
    local file release
    for file in /usr/lib/jvm/*/release; do
        [[ -f $file ]] || continue
        release=$(sed -n 's/^JAVA_VERSION="\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' "$file")
        ((release >= 8 && release <= 23)) && return
    done
    return 1
}

# Tcl environment modules cannot be installed beside Lmod, so their package is unpacked into the build folder.
unpack_modules() {
    local folder=$root/build/environment-modules work deb
    [[ -f $root/setup.cfg && ! -d $folder ]] || return 0
    work=$(mktemp -d)
    if (cd "$work" && apt-get -qq download environment-modules >/dev/null 2>&1) &&
        deb=$(compgen -G "$work/environment-modules_*.deb") && mkdir -p "$root/build" &&
        dpkg -x "$deb" "$folder.new"; then
        mv -T "$folder.new" "$folder"
        say "unpacked: environment-modules, into $folder"
    else
        say "environment-modules cannot be fetched: the tests with Tcl modules are skipped"
    fi
    rm -rf "$work"
}

installed() {
    [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    say "this is not Debian or Ubuntu, so nothing is installed. The Slurm tests look for slurmctld, slurmd," \
        "munged and ip, the module tests for Lmod, the InfiniBand tests for ibsim and ibnetdiscover, and are skipped where these are missing."
    exit 0
fi

if ! fitting_java; then
    # Debian 13 has no Java 17 any more.
    release=$(. /etc/os-release && [[ ${ID:-} == debian && ${VERSION_ID:-0} -ge 13 ]] && echo 21 || echo 17)
    packages+=("openjdk-$release-jre-headless")
fi
missing=()
for package in "${packages[@]}"; do
    installed "$package" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
    say "present: ${packages[*]}"
    unpack_modules
    exit 0
fi
if ((EUID != 0)); then
    say "missing: ${missing[*]}. An administrator installs them with"
    say "    apt-get install --no-install-recommends ${missing[*]}"
    say "going on without: the tests that need them are skipped, which the summary at the end shows"
    exit 0
fi

say "installing ${missing[*]} (apt-get, without recommended packages)"
export DEBIAN_FRONTEND=noninteractive
quiet=(-qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300)
apt-get "${quiet[@]}" update
apt-get "${quiet[@]}" install --yes --no-install-recommends "${missing[@]}"
say "installed: ${missing[*]}"
unpack_modules
