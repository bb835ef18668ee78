# Become a host of the cluster, then the given program: run by `nsenter --net unshare --uts --mount`,
# so nothing here is seen outside.
# usage: enter.sh HOST HOSTS_FILE SCRATCH PROGRAM ARGS...
set -e
host=$1 hosts_file=$2 scratch=$3
shift 3
hostname "$host"
mount --bind "$hosts_file" /etc/hosts
# Nodes do not share memory; and what killed programs leave there goes with the node.
mount -t tmpfs -o mode=1777 devcluster /dev/shm
# /sys/class/net shows the namespace that sysfs was mounted in, so mount it again, and keep the cgroups
# of the old one, without which slurmd ends.
if mount --rbind /sys/fs/cgroup "$scratch" 2>/dev/null; then
    if mount -t sysfs devcluster /sys 2>/dev/null; then
        mount --rbind "$scratch" /sys/fs/cgroup
    fi
    umount -l "$scratch"
fi
exec "$@"
