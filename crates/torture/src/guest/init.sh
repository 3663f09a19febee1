#!/bin/sh
# The only program of the guest: makes a file system on the disk, writes files with known checksums until it is told to
# stop, and checks everything. Each line that it prints is read by the test; `T` and a number says that a file is durable.
# Its shell finds all other programs in itself, once there is /proc.
/bin/busybox mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
# Which module wants which others differs: what could not be loaded is tried again after the rest.
for pass in 1 2 3 4; do
    for m in /m/*.ko; do insmod $m 2>/dev/null && rm $m; done
done
end() { echo "RESULT $*"; poweroff -f; }
waited=0
while [ ! -b /dev/vda ]; do
    waited=$((waited + 1)); [ $waited -lt 100 ] || end "no-disk=1"
    sleep 0.1
done
# By their paths: busybox prefers programs of its own.
/bin/mke2fs -q -F -t ext4 /dev/vda && mount -t ext4 /dev/vda /mnt || end "no-file-system=1"
mkdir /mnt/0 /mnt/1 /mnt/2 /mnt/3
echo READY
( read line; touch /tmp/stop ) </dev/ttyS0 &
n=0; failed=0; wrong=0
while [ ! -e /tmp/stop ]; do
    n=$((n + 1)); file=$((n % 4))/f$n
    dd if=/dev/urandom of=/tmp/new bs=32k count=1 2>/dev/null
    sum=$(md5sum /tmp/new); echo "${sum%% *}  $file" >>/tmp/sums
    dd if=/tmp/new of=/mnt/$file bs=32k conv=fsync 2>/dev/null || failed=$((failed + 1))
    if [ $((n % 16)) = 0 ]; then
        # An older one, from the disk.
        echo 3 >/proc/sys/vm/drop_caches
        sed -n "$((n / 2))p" /tmp/sums >/tmp/one
        (cd /mnt && md5sum -c -s /tmp/one) || wrong=$((wrong + 1))
    fi
    read -r now rest </proc/uptime
    echo "T $n $now"
done
sync; umount /mnt || failed=$((failed + 1))
echo 3 >/proc/sys/vm/drop_caches
mount -t ext4 /dev/vda /mnt || end "no-mount=1"
cd /mnt; left=$(md5sum -c /tmp/sums 2>/dev/null | grep -vc ': OK$'); cd /
umount /mnt
/bin/e2fsck -f -n /dev/vda >/tmp/fsck 2>&1; fsck=$?
tail -3 /tmp/fsck
errors=$(dmesg | grep -icE 'I/O error|EXT4-fs (error|warning)|Buffer I/O|hung task|blocked for more')
dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)|Buffer I/O|blocked for more'
end "files=$n failed=$failed wrong=$wrong left=$left fsck=$fsck errors=$errors"
