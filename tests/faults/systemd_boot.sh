#!/bin/bash
# Boot a systemd of our own on an overlay of this machine's root, in a mount namespace of its own:
# nothing is written to the real root, and /tmp and /run inside are its own. $1 is a folder whose
# files are laid over the root; the rest are words for systemd.
#     unshare -m --propagation private bash systemd_boot.sh SEED [WORD...]
set -e
seed=$1; shift
over=$(mktemp -d /mnt/batchrun-systemd.XXXXXX)
trap 'umount -l "$over/root" "$over" 2>/dev/null; rmdir "$over"' EXIT
mount -t tmpfs -o size=1g tmpfs "$over"
mkdir "$over/upper" "$over/work" "$over/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$over/upper,workdir=$over/work" "$over/root"
cp -a "$seed/." "$over/root/"
timeout -k 20 360 systemd-nspawn --quiet --register=no --keep-unit --directory="$over/root" --private-network \
    --machine="batchrun-$$" --boot systemd.unit=basic.target systemd.show_status=0 "$@"
