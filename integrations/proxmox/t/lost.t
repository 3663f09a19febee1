#!/usr/bin/perl -T

# A node is lost with a machine on it: HOLDFAST_DIR_A is its grid's directory, HOLDFAST_DIR_B that of the node that follows,
# HOLDFAST_HOST the process of the host that is killed.

use strict;
use warnings;

use Test::More;

use Disks;
use PVE::Storage::Custom::HoldfastPlugin;

my $plugin = 'PVE::Storage::Custom::HoldfastPlugin';
my ($on_a, $on_b) = map {
    { type => 'holdfast', 'holdfast-dir' => grid_dir("HOLDFAST_DIR_$_"), 'holdfast-layout' => 'mirror:2' }
} qw(A B);
my ($host) = $ENV{HOLDFAST_HOST} =~ /\A([0-9]+)\z/;
my @disks = map { $plugin->alloc_image('pve', $on_a, 100, 'raw', undef, 16 * 1024) } 1 .. 2;
for my $disk (@disks) {
    $plugin->activate_volume('pve', $on_a, $disk);
    writes(scalar $plugin->path($on_a, $disk, 'pve'), 0x11, '0', '4M', 'before');
}
$plugin->volume_snapshot($on_a, 'pve', $disks[0], 'monday');
kill('KILL', $host);

# One at once, and one when all of the grid knows.
for my $disk (@disks) {
    ok(eval { $plugin->activate_volume('pve', $on_b, $disk) }, "$disk is had elsewhere") or diag($@);
    my $path = $plugin->path($on_b, $disk, 'pve');
    reads($path, 0x11, '0', '4M', 'with what was written');
    writes($path, 0x22, '0', '1M', 'and can be written to');
}
is_deeply([keys %{ $plugin->volume_snapshot_info($on_b, 'pve', $disks[0]) }], ['monday'], 'its snapshot is there');
dies(sub { $plugin->check_connection('pve', $on_a) }, qr/can not be reached/, 'the node that is lost says nothing');
for my $disk (@disks) {
    ok($plugin->deactivate_volume('pve', $on_b, $disk));
    ok(!defined($plugin->free_image('pve', $on_b, $disk, 0, 'raw')), 'it can be deleted');
}

done_testing();
