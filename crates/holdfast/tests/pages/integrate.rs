//! Pages about what uses volumes.

use crate::reader::{QEMU, Reader, Site};
use crate::support::{find, needs, skip};
use holdfast_lab::page::Page;
use std::path::Path;

/// A machine as the page about installing leaves it, with volumes, and NBD by TLS as the page about security has it.
fn installed() -> Site {
    let mut site = Site::new(&["a"]);
    let a = site.at("a");
    a.types("export HOLDFAST_DIR=/var/lib/holdfast");
    a.types("holdfast grid up --nodes 3 --device-size 1GiB --address 10.0.0.1 --tls on");
    a.types("holdfast grid tls server 10.0.0.1 --out /etc/nbd-tls");
    a.types("holdfast grid tls client vm7 --out /etc/pki/vm7");
    a.types(
        "printf 'nbd.tcp = \"10.0.0.1:10809\"\\nnbd.tls_dir = \"/etc/nbd-tls\"\\n' >>/var/lib/holdfast/holdfast.toml",
    );
    a.types("holdfast grid down --host; holdfast grid up");
    a.types("for v in vm1 db; do holdfast volume create $v --size 1GiB; done; holdfast volume allow db vm7");
    site
}

#[test]
fn the_page_about_backups_works_as_it_is_typed() {
    let (mut site, mut page) = (installed(), Page::open("integrate/backup.md"));
    let a = site.at("a");
    a.types("mkdir -p /etc/cron.d; holdfast snapshot create vm1 first");
    let restore = Path::new(env!("CARGO_BIN_EXE_holdfast")).with_file_name("holdfast-restore");
    assert!(restore.exists(), "`cargo build -p holdfast-backup` makes holdfast-restore, as all tests together do");
    a.types(&page.block("mkdir -p /mnt/nas"));
    let verified = a.types(&page.block("echo '0 2 * * *"));
    assert!(verified.contains("2 backups"), "{verified}");
    // As cron would.
    let nightly = a.types("cut -d ' ' -f 7- /etc/cron.d/holdfast-backup | sh -e");
    assert!(nightly.contains("stay"), "{nightly}");
    a.types(&page.block("holdfast backup restore"));
    a.types(&page.block("holdfast-restore list"));
    let same = "nbdcopy \"nbd+unix:///vm1-again?socket=$HOLDFAST_DIR/nbd.sock\" out";
    a.types(&format!(
        "{same}; cmp out vm1.raw; cmp out vm1.img; rm out vm1.raw vm1.img; holdfast volume delete vm1-again"
    ));
    a.types("holdfast snapshot delete vm1 first");
    // The other grid is another reader's.
    let mut other = Reader::new();
    other.types("holdfast grid up --nodes 3 --device-size 1GiB");
    let ssh = "#!/bin/sh\nshift\nunset HOLDFAST_DIR\nHOME=OTHER exec \"$@\"\n";
    a.has_program("ssh", &ssh.replace("OTHER", &other.home.path().display().to_string()));
    a.types(&page.block("holdfast snapshot create vm1 monday"));
    a.types(&page.block("qemu-img convert"));
    a.types(&page.block("holdfast meta export"));
}

#[test]
fn the_page_about_images_works_as_it_is_typed() {
    let mut page = Page::open("integrate/import.md");
    let mut reader = Reader::new();
    reader.types("holdfast grid up --nodes 3 --device-size 1GiB");
    // Images that others made; the appliance has two disks.
    reader.types("mkdir -p /mnt/esx && head -c 40000000 /dev/urandom >disk");
    let convert = "qemu-img convert -f raw disk";
    reader.types(&format!("{convert} -O qcow2 debian-12.qcow2; {convert} -O vhdx old.vhdx"));
    reader.types(&format!("{convert} -O vmdk -o subformat=twoGbMaxExtentSparse /mnt/esx/server.vmdk"));
    reader.types(&format!("{convert} -O vmdk -o subformat=streamOptimized appliance-disk1.vmdk"));
    reader
        .types("cp appliance-disk1.vmdk b.vmdk; touch a.ovf; tar -cf appliance.ova a.ovf appliance-disk1.vmdk b.vmdk");
    reader.types(&page.block("holdfast volume import debian-12.qcow2"));
    let refused = reader.types("holdfast volume import old.vhdx old 2>&1 || true");
    assert!(refused.contains("qemu-img convert -O qcow2"), "{refused}");
    reader.types(&page.block("qemu-img convert -O qcow2 old.vhdx"));
    reader.types("holdfast volume export server");
    let same = "nbdcopy \"nbd+unix:///$v?socket=$HOME/.holdfast/grid/nbd.sock\" out && cmp -n 40000000 out disk";
    reader.types(&format!("for v in vm1 app server old; do {same} || exit; done"));
}

#[test]
fn the_page_about_linux_works_as_it_is_typed() {
    let (mut site, mut page) = (installed(), Page::open("integrate/linux.md"));
    let a = site.at("a");
    a.types("holdfast snapshot create vm1 monday; truncate -s 64M disk.raw");
    let by_fuse = page.block("mkdir -p /mnt/vm1");
    if !rustix::process::geteuid().is_root() || find("losetup").is_none() {
        skip("to mount files and to have loop devices one has to be root");
    } else {
        needs("nbdfuse");
        // The block's file goes on to be served until it is taken away again.
        let (serve, make) = by_fuse.split_once('\n').unwrap();
        let shown = "for i in $(seq 100); do [ -e /mnt/vm1/nbd ] && break; sleep 0.1; done";
        let away = "losetup -j /mnt/vm1/nbd | cut -d: -f1 | xargs -r losetup -d; fusermount3 -u /mnt/vm1";
        a.types(&format!("trap '{away}' EXIT\n{serve}\n{shown}\n{make}\n{away}\ntrap - EXIT"));
    }
    // This machine's kernel has no such client. What is in its place looks whether the export is there.
    a.has_program("modprobe", "#!/bin/sh\n[ \"$1\" = nbd ]\n");
    a.has_program("nbd-client", "#!/bin/sh\n[ \"$1 $3\" = '-unix -N' ] && nbdinfo \"nbd+unix:///$4?socket=$2\"\n");
    a.types(&page.block("modprobe nbd"));
    a.types(&page.block("nbdcopy disk.raw"));
    a.has("--runtime=30", "--runtime=3");
    a.types(&page.block("fio"));
    a.types(&page.block("nbdinfo 'nbds://"));
}

#[test]
fn the_pages_about_qemu_and_others_work_as_they_are_typed() {
    let (mut site, mut page) = (installed(), Page::open("integrate/qemu-libvirt.md"));
    let a = site.at("a");
    a.has_program("qemu-system-x86_64", QEMU);
    a.has_program("apt", "#!/bin/sh\n");
    a.types("export HOLDFAST_DIR=/var/lib/holdfast; qemu-img create -f qcow2 disk.qcow2 64M");
    a.types("holdfast snapshot create vm1 monday; holdfast volume create ocfs --size 1GiB");
    // The guest's machine is this one.
    a.has_program("virsh", &virsh());
    for (begins, tells) in [
        ("apt install", "virtual size: 1 GiB"),
        ("qemu-system-x86_64", "virtual size: 1 GiB"),
        ("holdfast volume xml vm1", "domain.xml validates"),
        ("qemu-img convert", "virtual size: 1 GiB"),
    ] {
        let said = a.types(&page.block(begins));
        assert!(said.contains(tells), "{said}");
    }
    page.leave_from("Live migration");
    let mut page = Page::open("integrate/others.md");
    a.types(&page.block("holdfast volume export ocfs"));
}

/// Looks whether a disk would be taken.
fn virsh() -> String {
    let check = needs("virt-xml-validate");
    let domain = "<domain type='qemu'><name>guest</name><memory>1</memory><os><type>hvm</type></os><devices>";
    let wrapped = format!("{{ echo \"{domain}\"; cat \"$3\"; echo '</devices></domain>'; }} >domain.xml");
    let is_it = "[ \"$1 $2 $4\" = 'attach-device guest --persistent' ]";
    format!("#!/bin/sh\n{is_it} && {wrapped} && {} domain.xml domain\n", check.display())
}

/// Where the page has a directory of the sources.
fn sources(name: &str) -> String {
    format!("{}/../../{name}", env!("CARGO_MANIFEST_DIR"))
}

/// What a node of Proxmox VE does with the plugin that was put into its place.
const PVESM: &str = r#"#!/usr/bin/perl
use strict;
use lib ('STUBS', 'PERL');
use PVE::Storage::Custom::HoldfastPlugin;
my ($plugin, $file) = ('PVE::Storage::Custom::HoldfastPlugin', "$ENV{HOME}/storage.cfg");
if ("@ARGV[0 .. 1]" eq 'add holdfast') {
    my (undef, undef, $storage, %options) = @ARGV;
    my %scfg = map { s/^--//r => $options{$_} } keys %options;
    $plugin->options()->{$_} or die "no option $_\n" for keys %scfg;
    $plugin->on_add_hook($storage, \%scfg);
    open(my $out, '>', $file) or die;
    print $out join("\n", %scfg);
    close($out);
} elsif ("@ARGV[0 .. 1]" eq 'status --storage') {
    open(my $in, '<', $file) or die;
    my %scfg = split(/\n/, join('', <$in>));
    my ($total, $free, $used, $active) = $plugin->status($ARGV[2], \%scfg, {});
    print "$ARGV[2] holdfast active $total $used $free\n" if $active;
} else {
    die "@ARGV: not known here\n";
}
"#;

#[test]
fn the_page_about_proxmox_works_as_it_is_typed() {
    let (mut site, mut page) = (installed(), Page::open("integrate/proxmox.md"));
    let a = site.at("a");
    let perl = a.path("perl5").display().to_string();
    a.types(&format!("mkdir {perl}"));
    a.has("/usr/share/perl5/", &format!("{perl}/"));
    a.has("integrations/", &sources("integrations/"));
    a.has_program("systemctl", "#!/bin/sh\n[ \"$*\" = 'restart pvedaemon pveproxy pvestatd' ]\n");
    a.has_program("qm", "#!/bin/sh\n[ \"$*\" = 'disk rescan --vmid 100' ]\n");
    let stubs = sources("integrations/proxmox/t/lib");
    a.has_program("pvesm", &PVESM.replace("STUBS", &stubs).replace("PERL", &perl));
    a.types(&page.block("cp -r"));
    let said = a.types(&page.block("pvesm add"));
    assert!(said.contains("grid holdfast active "), "{said}");
    a.types("holdfast volume create grid.vm-100-disk-0 --size 64MiB");
    a.types(&page.block("holdfast volume explain"));
    a.types("holdfast volume delete grid.vm-100-disk-0");
    a.types(&page.block("holdfast volume trash restore"));
    let said = a.types(&page.block("curl"));
    assert!(said.contains("\"free_bytes\":"), "{said}");
}

#[test]
fn the_page_about_ansible_works_as_it_is_typed() {
    let mut page = Page::open("integrate/ansible.md");
    let mut reader = Reader::new();
    reader.types(&format!("cp -r {} .", sources("integrations")));
    // Their own programs look at these files in `./x ansible`.
    reader.has_program("ansible-playbook", "#!/bin/sh\nfor last; do :; done\n[ -s mine.yml ] && [ -s \"$last\" ]\n");
    reader.has_program("cloud-init", "#!/bin/sh\n[ \"$1 $2\" = 'schema --config-file' ] && [ -s \"$3\" ]\n");
    reader.types(&page.block("cd integrations/ansible"));
    reader.types(&page.block("cloud-init schema"));
}
