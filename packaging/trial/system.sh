# Run as root in each system of `./x package --install`. What fails ends it.
set -eE -o pipefail
say() { echo "install: $*"; }
trap 'say "line $LINENO failed"' ERR
name=$(. /etc/os-release; echo "$PRETTY_NAME")
[ "$(holdfast --version)" = "holdfast $(dpkg-query -W -f '${Version}' holdfast)" ]
holdfast --help >/dev/null
[ "$(holdfast-restore --version)" = "holdfast-restore $(dpkg-query -W -f '${Version}' holdfast-restore)" ]
[ -s /usr/share/man/man1/holdfast-restore.1.gz ]
for file in bash-completion/completions/holdfast zsh/vendor-completions/_holdfast fish/vendor_completions.d/holdfast.fish; do
    [ -s "/usr/share/$file" ]
done
bash -n /usr/share/bash-completion/completions/holdfast
getent group holdfast-readers >/dev/null
useradd --create-home --shell /bin/bash ann
cat >/home/ann/typed.sh <<'END'
set -eE -o pipefail
trap 'echo "install: ann, line $LINENO failed"; cat ~/.holdfast/grid/logs/* | tail -20' ERR
# `status` says by its code that not all is well.
holdfast() { command holdfast "$@" || [ "$1" = status ]; }
. /root/page.sh
uri="nbd+unix:///vm1?socket=$HOME/.holdfast/grid/nbd.sock"
qemu-io -f raw -c 'write -P 0x5a 0 16M' -c 'write -P 0x3c 1G 4M' "$uri"
holdfast node kill 2
qemu-io -r -f raw -c 'read -P 0x5a 0 16M' -c 'read -P 0x3c 1G 4M' -c 'read -P 0 16M 1M' "$uri"
holdfast node start 2
holdfast grid down
holdfast grid up
for i in $(seq 120); do holdfast volume list | grep -q 'vm1.*open' && break; sleep 0.5; done
qemu-io -r -f raw -c 'read -P 0x5a 0 16M' -c 'read -P 0x3c 1G 4M' "$uri"
holdfast grid down --force
END
chmod 755 /root; chmod 644 /root/page.sh
su - ann -c 'bash ~/typed.sh'
# No grid of root's is here: nothing of it stays.
dpkg --purge holdfast holdfast-restore
! pgrep -x holdfast
[ ! -e /var/lib/holdfast ] && [ ! -e /usr/bin/holdfast ] && [ ! -e /usr/bin/holdfast-restore ]
say "$name: installed by apt, a volume was written and read with a node lost, purged"
