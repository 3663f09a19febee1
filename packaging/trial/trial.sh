# Run as root on the machine of `./x package --try`, at each of its two boots. What fails ends it.
set -eE -o pipefail
say() { echo "trial: $*"; }
trap 'say "line $LINENO failed"; systemctl --no-pager status "holdfast*" || true; journalctl -b -u "holdfast*" --no-pager | tail -40' ERR
# `status` says by its code that not all is well.
holdfast() { command holdfast "$@" || [ "$1" = status ]; }
boot=$(sed -n 's/.*trial=\([a-z]*\).*/\1/p' /proc/cmdline)
uri="nbd+unix:///vm1?socket=/var/lib/holdfast/nbd.sock"
pids() { systemctl show --property MainPID --value 'holdfast-node@*.service' holdfast-host.service | grep -v '^$' | tr '\n' ' '; }
serving() {
    local i
    for i in $(seq 120); do holdfast volume list 2>/dev/null | grep -q 'vm1.*open' && return; sleep 0.5; done
    say "volume vm1 is not open"; holdfast volume list; return 1
}

if [ "$boot" = first ]; then
    say "$(. /etc/os-release; echo "$PRETTY_NAME"), $(systemctl --version | head -1), $(command holdfast --version)"
    getent group holdfast-readers >/dev/null
    [ ! -e /var/lib/holdfast/grid.json ]
    # Nothing is there to be started.
    systemctl start holdfast.target holdfast-host.service holdfast-node@1.service
    [ "$(pids | tr -d '0 ')" = "" ]
    bash -n /usr/share/bash-completion/completions/holdfast
@PAGE@
    holdfast volume create vm1 --size 256MiB --layout mirror:2@device
    serving
    qemu-io -f raw -c 'write -P 0x5a 0 16M' -c 'write -P 0x3c 100M 4M' "$uri"
    say "a volume was written: $(pids)"
    systemctl is-enabled holdfast.target
    systemd-analyze verify holdfast-host.service holdfast.target holdfast-node@1.service 2>&1 | grep holdfast && false

    # The same package once more: what runs goes on.
    before=$(pids)
    said=$(DEBIAN_FRONTEND=noninteractive dpkg -i /root/holdfast_*.deb 2>&1)
    echo "$said" | grep -q 'holdfast node restart --rolling'
    [ "$(pids)" = "$before" ]
    say "the package was brought in again; processes go on: $before"
    qemu-io -r -f raw -c 'read -P 0x5a 0 16M' -c 'read -P 0x3c 100M 4M' "$uri"
else
    # Nobody has started anything.
    serving
    qemu-io -r -f raw -c 'read -P 0x5a 0 16M' -c 'read -P 0x3c 100M 4M' "$uri"
    say "systemd has started the grid, and the volume has what was written: $(pids)"
    said=$(DEBIAN_FRONTEND=noninteractive dpkg --purge holdfast 2>&1)
    echo "$said" | grep -q '/var/lib/holdfast'
    [ -e /var/lib/holdfast/grid.json ]
    ! pgrep -x holdfast
    say "purged: nothing runs, and the data are kept"
    dpkg -i /root/holdfast_*.deb
    [ "$(pids | tr -d '0 ')" = "" ]
    systemctl enable --now holdfast.target
    serving
    qemu-io -r -f raw -c 'read -P 0x5a 0 16M' -c 'read -P 0x3c 100M 4M' "$uri"
    say "installed again: the grid of before serves"
fi
say "$boot boot is well"
