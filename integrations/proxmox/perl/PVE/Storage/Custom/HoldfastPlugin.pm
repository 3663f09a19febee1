package PVE::Storage::Custom::HoldfastPlugin;

# Volumes of a Holdfast grid as disks of virtual machines.
#
# A disk of PVE is a volume of the grid: PREFIX.vm-100-disk-0. The prefix keeps clusters and others' volumes apart. A
# linked clone names its template, PREFIX.base-100-disk-0.vm-101-disk-0, so that its name in PVE is the same for ever. No
# name of PVE's has a dot, so each reads one way only.
#
# On each node the same directory leads to that node's own host. A volume that runs elsewhere is offered here too while
# it has clients, as in a migration; else it comes here, and a migration's source hands it over when it is done.
#
# All of it goes over api.sock. What was begun and failed is taken back.

use strict;
use warnings;

use Holdfast::Client;
use PVE::Storage::Plugin;
use Time::HiRes qw(sleep);

use base qw(PVE::Storage::Plugin);

# Versions of PVE's interface that this was written for: what came with them is in PVE's ApiChangeLog.
my ($API_MIN, $API_MAX) = (11, 15);

# Of each template: what its linked clones begin with. PVE's own snapshots have no dot.
my $BASE_SNAPSHOT = 'pve.base';

# As the grid has it.
my $BLOCK_BYTES = 4096;
my $SIZE_BYTES_MIN = 1 << 20;
my $NAME_BYTES_MAX = 64;

# QEMU keeps requests for so many seconds while the host is started anew.
my $RECONNECT_SECONDS = 120;

# How long the host that serves a volume may be silent until it counts as gone.
my $OWNER_SECONDS = 20;

# How long a client that has just gone may count as connected, in seconds.
my $HANG_UP_SECONDS = 5;

my $NAME = qr/(?:vm|base)-[1-9][0-9]{2,8}-[A-Za-z0-9_-]+/;
my $BASE_NAME = qr/base-[1-9][0-9]{2,8}-[A-Za-z0-9_-]+/;

# PVE asks plugins of its own for no such thing.
push @PVE::Storage::Plugin::SHARED_STORAGE, 'holdfast'
    if !grep { $_ eq 'holdfast' } @PVE::Storage::Plugin::SHARED_STORAGE;

# The newest that both know.
sub api {
    my $theirs = eval { PVE::Storage::APIVER() } // $API_MAX;
    return $theirs < $API_MIN ? $API_MIN : $theirs > $API_MAX ? $API_MAX : $theirs;
}

sub type {
    return 'holdfast';
}

sub plugindata {
    return {
        content => [{ images => 1 }, { images => 1 }],
        format => [{ raw => 1 }, 'raw'],
        'sensitive-properties' => {},
    };
}

sub properties {
    return {
        'holdfast-dir' => {
            description => 'Directory of the grid on each node, with api.sock and nbd.sock.',
            type => 'string',
            format => 'pve-storage-path',
        },
        'holdfast-prefix' => {
            description => 'What names of volumes in the grid begin with. By default the name of the storage.',
            type => 'string',
            pattern => '[A-Za-z0-9][A-Za-z0-9_-]{0,15}',
        },
        'holdfast-layout' => {
            description => 'How new disks outlive losses, as `holdfast volume plan` tells them: mirror:2, parity:2+1.'
                . ' By default what the grid has for new volumes.',
            type => 'string',
            pattern => '[a-z]+(-[a-z]+)?(:[0-9+]+)?(@device)?',
        },
    };
}

sub options {
    return {
        'holdfast-dir' => { fixed => 1 },
        'holdfast-prefix' => { optional => 1, fixed => 1 },
        'holdfast-layout' => { optional => 1 },
        nodes => { optional => 1 },
        disable => { optional => 1 },
        shared => { optional => 1 },
        content => { optional => 1 },
        bwlimit => { optional => 1 },
    };
}

# Names

sub parse_volname {
    my ($class, $volname) = @_;

    if ($volname =~ m{\A(?:($BASE_NAME)/)?($NAME)\z}) {
        my ($basename, $name) = ($1, $2);
        my ($basevmid) = ($basename // '') =~ /\Abase-([0-9]+)-/;
        my ($kind, $vmid) = $name =~ /\A(vm|base)-([0-9]+)-/;
        my $is_base = $kind eq 'base' ? 'base-' : undef;
        return ('images', $name, $vmid, $basename, $basevmid, $is_base, 'raw');
    }

    die "`$volname` is no disk of this storage: names are vm-ID-NAME, of letters, digits, `-` and `_`\n";
}

my sub prefix_of {
    my ($scfg, $storeid) = @_;
    my ($prefix) = ($scfg->{'holdfast-prefix'} // $storeid) =~ /\A([A-Za-z0-9][A-Za-z0-9_-]*)\z/;
    die "the name of storage `$storeid` can't begin names of volumes; give the storage a holdfast-prefix\n"
        if !defined($prefix);
    return $prefix;
}

# What a disk is called in the grid.
my sub grid_name {
    my ($class, $scfg, $storeid, $volname) = @_;
    my (undef, $name, undef, $basename) = $class->parse_volname($volname);
    my $full = join('.', prefix_of($scfg, $storeid), $basename // (), $name);
    die "`$full` is too long for the grid, whose names have $NAME_BYTES_MAX letters: choose a shorter name"
        . " (of the snapshot, if it is a machine's state), or a shorter holdfast-prefix for a new storage\n"
        if length($full) > $NAME_BYTES_MAX;
    return $full;
}

# What PVE calls a volume of the grid, if it is one of this storage.
my sub volname_of {
    my ($scfg, $storeid, $full) = @_;
    my $prefix = prefix_of($scfg, $storeid);
    return if $full !~ m{\A\Q$prefix\E\.(?:($BASE_NAME)\.)?($NAME)\z};
    return defined($1) ? "$1/$2" : $2;
}

my sub client {
    my ($scfg) = @_;
    return Holdfast::Client->new(dir => $scfg->{'holdfast-dir'});
}

my sub at {
    my (@parts) = @_;
    return '/v1/' . join('/', map { Holdfast::Client::escaped($_) } @parts);
}

my sub number {
    my ($given) = @_;
    my ($digits) = ($given // '') =~ /\A([0-9]+)(?:\.0)?\z/;
    return int($digits // 0);
}

# Questions and changes, of volumes by their names in the grid

my sub show {
    my ($client, $full) = @_;
    return $client->look(at('volumes', $full), patience => $OWNER_SECONDS);
}

my sub is_gone {
    my ($problem) = @_;
    return $problem && $problem->{code} eq 'not-found';
}

# A volume of the grid; the end where there is none.
my sub found {
    my ($client, $full) = @_;
    return $client->told(show($client, $full));
}

# What the grid holds, of volumes in a layout, and the host that was asked.
my sub room {
    my ($scfg, %options) = @_;
    my $client = client($scfg);
    my $layout = $scfg->{'holdfast-layout'};
    my $query = defined($layout) ? '?layout=' . Holdfast::Client::escaped($layout) : '';
    return $client->told($client->look(at('room') . $query, %options));
}

my sub this_host {
    my ($scfg) = @_;
    my ($host) = (room($scfg)->{host} // '') =~ /\A([A-Za-z0-9._-]+)\z/ or die "the host does not say its name\n";
    return $host;
}

my sub is_in_service {
    my ($volume) = @_;
    return $volume->{exported} && defined($volume->{host}) && !$volume->{orphaned};
}

# In service, whichever host has it: what a snapshot needs.
my sub in_service {
    my ($client, $full) = @_;
    my $volume = found($client, $full);
    return $volume if is_in_service($volume);
    return $client->told($client->change('POST', at('volumes', $full, 'export'), {}));
}

my sub offers {
    my ($volume, $host) = @_;
    return (grep { $_ eq $host } @{ $volume->{offered_by} // [] }) ? 1 : 0;
}

my sub export_here {
    my ($client, $full, $body) = @_;
    return $client->change('POST', at('volumes', $full, 'export'), $body);
}

# A change, tried again while only a client stands in its way that has just gone.
my sub change_once_quiet {
    my ($client, $method, $path, $body) = @_;
    my $end = time() + $HANG_UP_SECONDS;
    while (1) {
        my ($answer, $problem) = $client->change($method, $path, $body);
        return ($answer, $problem) if !$problem || $problem->{code} ne 'in-use' || time() >= $end;
        sleep(0.2);
    }
}

# Clients of this node reach it by this node's host, and have it served here unless others use it elsewhere.
my sub bring_here {
    my ($scfg, $client, $full) = @_;
    my $here = this_host($scfg);
    my $volume = found($client, $full);
    if (is_in_service($volume)) {
        my $is_here = $volume->{host} eq $here;
        return if $is_here ? $volume->{state} eq 'open' : offers($volume, $here);
        # Where it is taken out of service nobody used it. Else it stays there, and is offered here as well.
        my (undef, $problem) = $is_here ? () : $client->change('DELETE', at('volumes', $full, 'export'));
        return $client->told(export_here($client, $full, { multipath => \1 })) if $problem;
    }
    # That waits until it is open.
    return $client->told(export_here($client, $full, {}));
}

# Configuration

sub on_add_hook {
    my ($class, $storeid, $scfg, %sensitive) = @_;
    prefix_of($scfg, $storeid);
    room($scfg);
    return;
}

sub check_connection {
    my ($class, $storeid, $scfg) = @_;
    room($scfg, timeout => 3);
    return 1;
}

sub activate_storage {
    my ($class, $storeid, $scfg, $cache) = @_;
    return 1;
}

sub deactivate_storage {
    my ($class, $storeid, $scfg, $cache) = @_;
    return 1;
}

# What guests can write, in the layout of new disks.
sub status {
    my ($class, $storeid, $scfg, $cache) = @_;
    my $told = room($scfg, timeout => 5);
    my ($total, $free, $used) = map { number($told->{$_}) } qw(total_bytes free_bytes used_bytes);
    return ($total, $free, $used, 1);
}

# Disks

sub path {
    my ($class, $scfg, $volname, $storeid, $snapname) = @_;
    my ($vtype, undef, $vmid) = $class->parse_volname($volname);
    my $export = grid_name($class, $scfg, $storeid, $volname);
    $export .= '@' . $snapname if defined($snapname) && length($snapname);
    my $dir = client($scfg)->dir();
    # What has a meaning in URIs is written otherwise.
    $dir =~ s{([^A-Za-z0-9/._-])}{sprintf('%%%02X', ord($1))}ge;
    my $path = "nbd+unix:///$export?socket=$dir/nbd.sock";
    return wantarray ? ($path, $vmid, $vtype) : $path;
}

sub filesystem_path {
    my ($class, $scfg, $volname, $snapname) = @_;
    die "disks of a grid are no files: the path is nbd+unix://...\n";
}

sub qemu_blockdev_options {
    my ($class, $scfg, $storeid, $volname, $machine_version, $options) = @_;
    my $export = grid_name($class, $scfg, $storeid, $volname);
    my $snapname = $options->{'snapshot-name'};
    $export .= '@' . $snapname if defined($snapname) && length($snapname);
    my $socket = client($scfg)->dir() . '/nbd.sock';
    return {
        driver => 'nbd',
        server => { type => 'unix', path => "$socket" },
        export => "$export",
        'reconnect-delay' => int($RECONNECT_SECONDS),
    };
}

# PVE asks the storage for snapshots, whether the machine runs or not.
sub volume_qemu_snapshot_method {
    my ($class, $storeid, $scfg, $volname) = @_;
    return 'storage';
}

# Makes a volume by a request of that path and body, of which `{}` with a name is the name; gives what PVE calls it. Without
# a name the first one is taken that is free.
my sub make {
    my ($class, $storeid, $scfg, $vmid, $given) = @_;
    my $client = client($scfg);
    while (1) {
        my $name = $given->{name} // $class->find_free_diskname($storeid, $scfg, $vmid, 'raw');
        my $volname = defined($given->{basename}) ? "$given->{basename}/$name" : $name;
        my $full = grid_name($class, $scfg, $storeid, $volname);
        my ($there, $problem) = show($client, $full);
        $client->told($there, $problem) if $problem && !is_gone($problem);
        if ($there) {
            die "disk `$volname` is there already, as volume $full of the grid\n" if defined($given->{name});
            # Another node was faster.
            next;
        }
        (undef, $problem) = $client->change('POST', $given->{path}, { %{ $given->{body} }, name => $full });
        return $volname if !$problem;
        # It was not there before, so it is of an attempt whose answer was lost.
        return $volname if $problem->{code} eq 'exists' && $problem->{again};
        next if $problem->{code} eq 'exists' && !defined($given->{name});
        # What goes on although nobody heard how it ends is not left behind.
        $client->change('DELETE', at('volumes', $full) . '?now=true') if $problem->{code} eq 'unavailable';
        $client->told(undef, $problem);
    }
}

sub alloc_image {
    my ($class, $storeid, $scfg, $vmid, $fmt, $name, $size) = @_;

    die "disks of this storage are raw, and `$fmt` was asked for\n" if $fmt ne 'raw';
    die "`$name` can't be a disk of machine $vmid here: it has to be vm-$vmid-NAME\n"
        if defined($name) && $name !~ /\Avm-\Q$vmid\E-[A-Za-z0-9_-]+\z/;

    my $bytes = number($size) * 1024;
    $bytes = $SIZE_BYTES_MIN if $bytes < $SIZE_BYTES_MIN;
    $bytes += -$bytes % $BLOCK_BYTES;
    my $layout = $scfg->{'holdfast-layout'} // room($scfg)->{layout};
    my $body = { size_bytes => $bytes, layout => "$layout" };
    return make($class, $storeid, $scfg, $vmid, { name => $name, path => at('volumes'), body => $body });
}

sub free_image {
    my ($class, $storeid, $scfg, $volname, $is_base, $format) = @_;

    my (undef, $name) = $class->parse_volname($volname);
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    my ($volume, $problem) = show($client, $full);
    if (is_gone($problem)) {
        warn "disk `$volname` is gone already\n";
        return;
    }
    $client->told($volume, $problem);
    # A template can't be deleted while a clone of it is in the trash. What a machine had in memory, and what is made anew
    # with each start, nobody asks for again.
    my $is_for_good = defined($volume->{shares_with}) || $name =~ /\Avm-[0-9]+-(?:state-|cloudinit\z)/;
    my $query = $is_for_good ? '?now=true' : '';
    (undef, $problem) = change_once_quiet($client, 'DELETE', at('volumes', $full) . $query);
    $client->told(undef, $problem) if $problem && !is_gone($problem);
    return;
}

sub list_images {
    my ($class, $storeid, $scfg, $vmid, $vollist, $cache) = @_;

    my $client = client($scfg);
    my $told = $client->told($client->look(at('volumes')));
    my %wanted = map { $_ => 1 } @{ $vollist // [] };
    my @images;
    for my $volume (@{ $told->{volumes} }) {
        next if defined($volume->{clone_of}) || $volume->{is_store};
        my $volname = volname_of($scfg, $storeid, $volume->{name}) // next;
        my (undef, undef, $owner, $basename) = $class->parse_volname($volname);
        my $volid = "$storeid:$volname";
        next if $vollist ? !$wanted{$volid} : defined($vmid) && $owner ne $vmid;
        push @images, {
            volid => $volid,
            format => 'raw',
            size => number($volume->{size_bytes}),
            vmid => $owner,
            used => number($volume->{live}->{mapped_bytes}),
            parent => defined($basename) ? "$basename\@$BASE_SNAPSHOT" : undef,
        };
    }
    return [sort { $a->{volid} cmp $b->{volid} } @images];
}

my sub snapshots_of {
    my ($client, $full) = @_;
    my $told = $client->told($client->look(at('volumes', $full, 'snapshots'), patience => $OWNER_SECONDS));
    return $told->{snapshots};
}

my sub has_snapshot {
    my ($client, $full, $snapshot) = @_;
    return scalar(grep { $_->{name} eq $snapshot } @{ snapshots_of($client, $full) });
}

my sub take_snapshot {
    my ($client, $full, $snapshot) = @_;
    in_service($client, $full);
    my $was_there = has_snapshot($client, $full, $snapshot);
    die "volume $full has a snapshot `$snapshot` already; delete it first\n" if $was_there;
    my (undef, $problem) = $client->change('POST', at('volumes', $full, 'snapshots'), { name => $snapshot });
    return if $problem && $problem->{code} eq 'exists' && $problem->{again};
    $client->told(undef, $problem);
    return;
}

my sub drop_snapshot {
    my ($client, $full, $snapshot) = @_;
    my (undef, $problem) = change_once_quiet($client, 'DELETE', at('volumes', $full, 'snapshots', $snapshot));
    $client->told(undef, $problem) if $problem && !is_gone($problem);
    return;
}

# A template is not written to: whenever its snapshot is taken it holds the same.
my sub have_base_snapshot {
    my ($client, $full) = @_;
    in_service($client, $full);
    take_snapshot($client, $full, $BASE_SNAPSHOT) if !has_snapshot($client, $full, $BASE_SNAPSHOT);
    return;
}

sub create_base {
    my ($class, $storeid, $scfg, $volname) = @_;

    my (undef, $name, undef, $basename, undef, $is_base) = $class->parse_volname($volname);
    die "`$volname` is a template already\n" if $is_base;
    (my $newname = $name) =~ s/\Avm-/base-/;
    my $newvolname = defined($basename) ? "$basename/$newname" : $newname;
    my ($client, @full) = (client($scfg), map { grid_name($class, $scfg, $storeid, $_) } $volname, $newvolname);

    my ($volume, $problem) = show($client, $full[0]);
    $client->told($volume, $problem) if $problem && !is_gone($problem);
    # Where it has that name already an attempt before this one was cut short, or its answer was lost.
    if ($volume) {
        in_service($client, $full[0]);
        drop_snapshot($client, $full[0], $BASE_SNAPSHOT) if has_snapshot($client, $full[0], $BASE_SNAPSHOT);
        my $path = at('volumes', $full[0], 'rename');
        (undef, $problem) = $client->change('POST', $path, { name => $full[1] });
        $client->told(undef, $problem) if $problem && !($problem->{again} && is_gone($problem));
    }
    have_base_snapshot($client, $full[1]);
    return $newvolname;
}

sub clone_image {
    my ($class, $scfg, $storeid, $volname, $vmid, $snapname) = @_;

    my (undef, $name, undef, undef, undef, $is_base) = $class->parse_volname($volname);
    my $has_name = defined($snapname) && length($snapname);
    die "`$volname` is neither a template nor was a snapshot named: a linked clone needs one\n" if !$is_base && !$has_name;
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    if ($has_name) {
        in_service($client, $full);
    } else {
        have_base_snapshot($client, $full);
    }
    my $snapshot = $has_name ? $snapname : $BASE_SNAPSHOT;
    # A volume of its own: any node can have it, wherever the template is.
    my $made = make($class, $storeid, $scfg, $vmid, {
        basename => $has_name ? undef : $name,
        path => at('volumes', $full, 'snapshots', $snapshot, 'clone'),
        body => { separate => \1, export => \0 },
    });
    # It begins with snapshots of the other, which its machine knows nothing of.
    my $clone = grid_name($class, $scfg, $storeid, $made);
    my $is_bare = eval {
        in_service($client, $clone);
        drop_snapshot($client, $clone, $_->{name}) for @{ snapshots_of($client, $clone) };
        1;
    };
    if (!$is_bare) {
        my $why = $@;
        $client->change('DELETE', at('volumes', $clone) . '?now=true');
        die $why;
    }
    return $made;
}

sub rename_volume {
    my ($class, $scfg, $storeid, $source_volname, $target_vmid, $target_volname) = @_;

    my (undef, undef, undef, $basename) = $class->parse_volname($source_volname);
    $target_volname //= $class->find_free_diskname($storeid, $scfg, $target_vmid, 'raw');
    my $target = defined($basename) ? "$basename/$target_volname" : $target_volname;
    my ($client, @full) = (client($scfg), map { grid_name($class, $scfg, $storeid, $_) } $source_volname, $target);
    my (undef, $problem) = change_once_quiet($client, 'POST', at('volumes', $full[0], 'rename'), { name => $full[1] });
    $client->told(undef, $problem) if $problem && !($problem->{again} && is_gone($problem));
    return "$storeid:$target";
}

sub volume_size_info {
    my ($class, $scfg, $storeid, $volname, $timeout) = @_;
    my (undef, undef, undef, $basename) = $class->parse_volname($volname);
    my $volume = found(client($scfg), grid_name($class, $scfg, $storeid, $volname));
    my $size = number($volume->{size_bytes});
    my $parent = defined($basename) ? "$basename\@$BASE_SNAPSHOT" : undef;
    return wantarray ? ($size, 'raw', number($volume->{live}->{mapped_bytes}), $parent) : $size;
}

sub volume_resize {
    my ($class, $scfg, $storeid, $volname, $size, $running, $snapname) = @_;

    die "a snapshot keeps its size\n" if defined($snapname) && length($snapname);
    # QEMU would refuse the new size after the volume has it.
    die "QEMU learns a disk's size when it connects: shut the machine down, resize the disk, start the machine\n" if $running;
    my $bytes = number($size);
    $bytes += -$bytes % $BLOCK_BYTES;
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    in_service($client, $full);
    $client->told($client->change('POST', at('volumes', $full, 'resize'), { size_bytes => $bytes }));
    return;
}

# Snapshots

my sub pve_snapshot {
    my ($snap) = @_;
    my ($name) = ($snap // '') =~ /\A([A-Za-z][A-Za-z0-9_-]*)\z/ or die "a snapshot can't be named like that\n";
    return $name;
}

sub volume_snapshot {
    my ($class, $scfg, $storeid, $volname, $snap) = @_;
    take_snapshot(client($scfg), grid_name($class, $scfg, $storeid, $volname), pve_snapshot($snap));
    return;
}

# Later snapshots stay.
sub volume_rollback_is_possible {
    my ($class, $scfg, $storeid, $volname, $snap, $blockers) = @_;
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    in_service($client, $full);
    die "disk `$volname` has no snapshot `$snap`\n" if !has_snapshot($client, $full, $snap);
    return 1;
}

sub volume_snapshot_rollback {
    my ($class, $scfg, $storeid, $volname, $snap) = @_;
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    in_service($client, $full);
    my $path = at('volumes', $full, 'snapshots', pve_snapshot($snap), 'rollback');
    $client->told(change_once_quiet($client, 'POST', $path));
    return;
}

sub volume_snapshot_delete {
    my ($class, $scfg, $storeid, $volname, $snap, $running) = @_;
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    in_service($client, $full);
    drop_snapshot($client, $full, pve_snapshot($snap));
    return;
}

sub volume_snapshot_info {
    my ($class, $scfg, $storeid, $volname) = @_;
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    in_service($client, $full);
    my %info;
    for my $snapshot (@{ snapshots_of($client, $full) }) {
        my ($name) = $snapshot->{name} =~ /\A([A-Za-z][A-Za-z0-9_-]*)\z/ or next;
        $info{$name} = {
            id => number($snapshot->{layer}),
            timestamp => int(number($snapshot->{created_ms}) / 1000),
            'virtual-size' => number($snapshot->{size_bytes}),
        };
    }
    return \%info;
}

sub rename_snapshot {
    my ($class, $scfg, $storeid, $volname, $source_snap, $target_snap) = @_;
    die "snapshots of a grid keep their names\n";
}

# A snapshot holds what was written when it was taken: what a machine's file system has yet to write it does not.
sub volume_snapshot_needs_fsfreeze {
    return 1;
}

sub volume_has_feature {
    my ($class, $scfg, $feature, $storeid, $volname, $snapname, $running, $opts) = @_;

    my %features = (
        snapshot => { current => 1, snap => 1 },
        clone => { base => 1, snap => 1 },
        template => { current => 1 },
        copy => { base => 1, current => 1, snap => 1 },
        sparseinit => { base => 1, current => 1 },
        rename => { current => 1 },
    );
    my (undef, undef, undef, undef, undef, $is_base) = $class->parse_volname($volname);
    my $state = $snapname ? 'snap' : $is_base ? 'base' : 'current';
    return $features{$feature}->{$state} ? 1 : undef;
}

# Nodes

sub activate_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $cache, $hints) = @_;

    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    bring_here($scfg, $client, $full);
    if (defined($snapname) && length($snapname)) {
        # Clients read snapshots where the volume is served.
        my $here = this_host($scfg);
        $client->told($client->change('POST', at('volumes', $full, 'handover'), { to => $here }))
            if found($client, $full)->{host} ne $here;
    }
    return 1;
}

sub deactivate_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $cache) = @_;

    return 1 if defined($snapname) && length($snapname);
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    my ($volume, $problem) = show($client, $full);
    return 1 if is_gone($problem);
    $client->told($volume, $problem);
    my $here = this_host($scfg);
    my ($other) = grep { $_ ne $here } @{ $volume->{offered_by} // [] };
    return 1 if !is_in_service($volume) || !defined($other) || !offers($volume, $here);
    # Its machine has left, or was never to stay: the other host serves it from here on. Where that can't be it is had through
    # this node as before.
    (undef, $problem) = $volume->{host} eq $here
        ? $client->change('POST', at('volumes', $full, 'handover'), { to => $other })
        : ();
    (undef, $problem) = change_once_quiet($client, 'DELETE', at('volumes', $full, 'export')) if !$problem;
    warn "volume $full stays at this node: $problem->{message}\n" if $problem;
    return 1;
}

# LXC and the state of a TPM take a block device, and no URI.
sub map_volume {
    my ($class, $storeid, $scfg, $volname, $snapname, $hints) = @_;
    my $full = grid_name($class, $scfg, $storeid, $volname);
    die "volume $full is no block device, which a container or the state of a TPM needs: keep that disk on another storage"
        . " (local-lvm, say)\n";
}

sub unmap_volume {
    my ($class, $storeid, $scfg, $volname, $snapname) = @_;
    return 1;
}

# Attributes

sub get_volume_attribute {
    my ($class, $scfg, $storeid, $volname, $attribute) = @_;
    return if $attribute ne 'protected';
    return found(client($scfg), grid_name($class, $scfg, $storeid, $volname))->{protected} ? 1 : 0;
}

sub update_volume_attribute {
    my ($class, $scfg, $storeid, $volname, $attribute, $value) = @_;
    die "attribute `$attribute` is not kept here; `protected` is\n" if $attribute ne 'protected';
    my ($client, $full) = (client($scfg), grid_name($class, $scfg, $storeid, $volname));
    $client->told($client->change('POST', at('volumes', $full, 'protect'), { protected => $value ? \1 : \0 }));
    return;
}

# Streams between storages

sub volume_export_formats {
    return ();
}

sub volume_import_formats {
    return ();
}

1;
