#!/usr/bin/perl -T

# Disks on two nodes of a cluster: HOLDFAST_DIR_A and HOLDFAST_DIR_B are the grid's directories on both.

use strict;
use warnings;

use Test::More;

use Disks;
use Holdfast::Client;
use PVE::Storage::Custom::HoldfastPlugin;

my $plugin = 'PVE::Storage::Custom::HoldfastPlugin';
my ($on_a, $on_b) = map {
    { type => 'holdfast', 'holdfast-dir' => grid_dir("HOLDFAST_DIR_$_"), 'holdfast-layout' => 'mirror:2' }
} qw(A B);
my $grid = Holdfast::Client->new(dir => $on_a->{'holdfast-dir'});
my $disk = 'vm-100-disk-0';

sub path_of {
    my ($scfg, $snapshot) = @_;
    return scalar $plugin->path($scfg, $disk, 'pve', $snapshot);
}

# Where it is served, and which hosts offer it beside that one.
sub place {
    my $volume = $grid->told($grid->look("/v1/volumes/pve.$disk"));
    my @others = grep { $_ ne $volume->{host} } @{ $volume->{offered_by} // [] };
    return join(' ', $volume->{host}, sort @others);
}

is($plugin->alloc_image('pve', $on_a, 100, 'raw', undef, 32 * 1024), $disk);
is(place(), 'a', 'it is in service where it was made');

subtest 'a machine is started on another node' => sub {
    ok($plugin->activate_volume('pve', $on_a, $disk));
    writes(path_of($on_a), 0x11, '0', '4M', 'on the first');
    ok($plugin->deactivate_volume('pve', $on_a, $disk)) for 1 .. 2;
    for (1 .. 2) {
        ok($plugin->activate_volume('pve', $on_b, $disk));
        is(place(), 'b', 'it is served where it is used');
    }
    reads(path_of($on_b), 0x11, '0', '4M', 'what the first wrote');
};

subtest 'a live migration' => sub {
    my $source = Disks::Client->new(path_of($on_b));
    $source->does('write -P 0x22 0 1M');
    ok($plugin->activate_volume('pve', $on_a, $disk)) for 1 .. 2;
    is(place(), 'b a', 'both offer it while both may need it');
    my $target = Disks::Client->new(path_of($on_a));
    $target->does('read -P 0x22 0 1M');
    $source->does('write -P 0x33 1M 1M');
    $target->does('read -P 0x33 1M 1M');
    $source->ends();
    $target->does('write -P 0x44 2M 1M');
    for (1 .. 2) {
        ok($plugin->deactivate_volume('pve', $on_b, $disk));
        is(place(), 'a', 'the node that it has left neither serves nor offers it');
    }
    $target->does('read -P 0x33 1M 1M');
    $target->does('write -P 0x55 3M 1M');
    $target->ends();
};

subtest 'a migration that is given up' => sub {
    my $source = Disks::Client->new(path_of($on_a));
    $source->does('read -P 0x55 3M 1M');
    ok($plugin->activate_volume('pve', $on_b, $disk));
    is(place(), 'a b');
    ok($plugin->deactivate_volume('pve', $on_b, $disk)) for 1 .. 2;
    is(place(), 'a', 'all is as it was');
    $source->does('write -P 0x66 4M 1M');
    dies(sub { $plugin->free_image('pve', $on_b, $disk, 0, 'raw') }, qr/connected/, 'a disk in use is not deleted');
    $source->ends();
};

subtest 'what the other node asks for' => sub {
    $plugin->volume_snapshot($on_b, 'pve', $disk, 'monday');
    is(place(), 'a', 'a snapshot is taken where the disk is');
    writes(path_of($on_a), 0x77, '4M', '1M', 'after it');
    ok($plugin->activate_volume('pve', $on_b, $disk, 'monday'));
    reads(path_of($on_b, 'monday'), 0x66, '4M', '1M', 'it is read at the other node');
    is(place(), 'b', 'which serves it, for snapshots are read there');
    $plugin->volume_snapshot_rollback($on_a, 'pve', $disk, 'monday');
    ok($plugin->activate_volume('pve', $on_a, $disk));
    reads(path_of($on_a), 0x66, '4M', '1M', 'rolled back from afar');
    $plugin->volume_resize($on_b, 'pve', $disk, 48 << 20, 0);
    is($plugin->volume_size_info($on_a, 'pve', $disk), 48 << 20);
};

subtest 'a template on one node, its clone on the other' => sub {
    my $base = $plugin->create_base('pve', $on_b, $disk);
    my $clone = $plugin->clone_image($on_b, 'pve', $base, 101);
    ok($plugin->activate_volume('pve', $on_b, $clone));
    reads(scalar $plugin->path($on_b, $clone, 'pve'), 0x66, '4M', '1M', 'the clone has its data');
    $plugin->free_image('pve', $on_a, $clone, 0, 'raw');
    $plugin->free_image('pve', $on_a, $base, 1, 'raw');
    is_deeply($plugin->list_images('pve', $on_b), [], 'nothing is left');
};

done_testing();
