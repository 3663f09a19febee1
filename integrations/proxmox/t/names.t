#!/usr/bin/perl -T

# What things are called, and what PVE is told without a grid.

use strict;
use warnings;

use Test::More;

use PVE::Storage::Custom::HoldfastPlugin;

my $plugin = 'PVE::Storage::Custom::HoldfastPlugin';
my $scfg = { type => 'holdfast', 'holdfast-dir' => '/srv/holdfast/' };

is($plugin->api(), 15, 'the newest version that is known, where PVE does not say its own');
for my $case ([10, 11], [12, 12], [13, 13], [99, 15]) {
    my ($theirs, $ours) = @$case;
    no warnings qw(once redefine);
    local *PVE::Storage::APIVER = sub { return $theirs };
    is($plugin->api(), $ours, "of a PVE with version $theirs");
}
isa_ok($plugin, 'PVE::Storage::Plugin');
is(scalar(grep { $_ eq 'holdfast' } @PVE::Storage::Plugin::SHARED_STORAGE), 1, 'it is shared storage');

my %named = map { $_ => 1 } keys %{ $plugin->options() };
my @kept = grep { !$named{$_} } keys %{ $plugin->properties() };
is("@kept", '', 'each property is an option');
my @others = grep { !/\Aholdfast-/ } keys %{ $plugin->properties() };
is("@others", '', 'properties have names of their own, which all plugins share');

my @parsed = $plugin->parse_volname('vm-100-disk-0');
is_deeply(\@parsed, ['images', 'vm-100-disk-0', 100, undef, undef, undef, 'raw']);
@parsed = $plugin->parse_volname('base-100-disk-0');
is_deeply(\@parsed, ['images', 'base-100-disk-0', 100, undef, undef, 'base-', 'raw']);
@parsed = $plugin->parse_volname('base-100-disk-0/vm-101-disk-3');
is_deeply(\@parsed, ['images', 'vm-101-disk-3', 101, 'base-100-disk-0', 100, undef, 'raw']);
for my $odd ('disk-0', 'vm-0-disk-0', 'vm-100-', 'vm-100-a.b', 'vm-100-a/b', 'vm-100-a b', "vm-100-disk-0\n", 'vm-1/vm-100-a') {
    ok(!eval { $plugin->parse_volname($odd); 1 }, "`$odd` is no disk");
    like($@, qr/is no disk of this storage/);
}

my ($path, $vmid, $type) = $plugin->path($scfg, 'vm-100-disk-0', 'grid');
is($path, 'nbd+unix:///grid.vm-100-disk-0?socket=/srv/holdfast/nbd.sock');
is("$vmid $type", '100 images');
is($plugin->path($scfg, 'base-9000-disk-0/vm-100-disk-0', 'grid', 'monday'),
    'nbd+unix:///grid.base-9000-disk-0.vm-100-disk-0@monday?socket=/srv/holdfast/nbd.sock');
is($plugin->path({ %$scfg, 'holdfast-dir' => '/my grid', 'holdfast-prefix' => 'pve2' }, 'vm-100-disk-0', 'grid'),
    'nbd+unix:///pve2.vm-100-disk-0?socket=/my%20grid/nbd.sock');
is_deeply(
    $plugin->qemu_blockdev_options($scfg, 'grid', 'vm-100-disk-0', '9.0+pve0', { 'snapshot-name' => 'monday' }),
    {
        driver => 'nbd',
        server => { type => 'unix', path => '/srv/holdfast/nbd.sock' },
        export => 'grid.vm-100-disk-0@monday',
        'reconnect-delay' => 120,
    },
);
is($plugin->volume_qemu_snapshot_method('grid', $scfg, 'vm-100-disk-0'), 'storage');

ok(!eval { $plugin->path($scfg, 'vm-100-disk-0', 'my.grid'); 1 });
like($@, qr/give the storage a holdfast-prefix/, 'a name with a dot could be read in two ways');
ok(!eval { $plugin->path($scfg, 'vm-100-state-' . 'x' x 40, 'a-storage-of-mine'); 1 });
like($@, qr/too long for the grid/);
ok(!eval { $plugin->path({ %$scfg, 'holdfast-dir' => 'grid' }, 'vm-100-disk-0', 'grid'); 1 });
like($@, qr/absolute path/);
ok(!eval { $plugin->map_volume('grid', $scfg, 'vm-100-tpmstate-0'); 1 });
like($@, qr/keep that disk on another storage/);
ok(!eval { $plugin->volume_resize($scfg, 'grid', 'vm-100-disk-0', 1 << 30, 1); 1 });
like($@, qr/shut the machine down/, 'QEMU could not follow');

my %features = (
    'vm-100-disk-0' => [qw(snapshot template copy sparseinit rename)],
    'base-100-disk-0' => [qw(clone copy sparseinit)],
);
for my $volname (sort keys %features) {
    my @has = grep { $plugin->volume_has_feature($scfg, $_, 'grid', $volname) }
        qw(snapshot clone template copy sparseinit rename replicate);
    is_deeply([sort @has], [sort @{ $features{$volname} }], "what can be done with $volname");
}
ok($plugin->volume_has_feature($scfg, 'clone', 'grid', 'vm-100-disk-0', 'monday'), 'a snapshot can be cloned');

ok(!eval { $plugin->status('grid', { %$scfg, 'holdfast-dir' => '/nowhere' }); 1 });
like($@, qr{the host of the grid at /nowhere can not be reached}, 'a host that is not there is said to be so');

done_testing();
