#!/usr/bin/perl -T

# Disks of a grid on one node, from their making to their deletion, each call twice: HOLDFAST_DIR is the grid's directory.

use strict;
use warnings;

use Test::More;

use Disks;
use Holdfast::Client;
use PVE::Storage::Custom::HoldfastPlugin;

my $plugin = 'PVE::Storage::Custom::HoldfastPlugin';
my $dir = grid_dir('HOLDFAST_DIR');
my $scfg = { type => 'holdfast', 'holdfast-dir' => $dir, 'holdfast-layout' => 'mirror:2' };
my $grid = Holdfast::Client->new(dir => $dir);

sub path_of {
    return scalar $plugin->path($scfg, $_[0], 'pve', $_[1]);
}

sub volids {
    return [map { $_->{volid} } @{ $plugin->list_images('pve', $scfg, @_) }];
}

sub volumes {
    return [sort map { $_->{name} } @{ $grid->told($grid->look('/v1/volumes'))->{volumes} }];
}

subtest 'the storage' => sub {
    ok(!defined($plugin->on_add_hook('pve', $scfg)), 'it is added');
    ok($plugin->check_connection('pve', $scfg));
    ok($plugin->activate_storage('pve', $scfg, {}));
    my ($total, $free, $used, $active) = $plugin->status('pve', $scfg, {});
    ok($active && $free > 0 && $total == $free + $used, 'what is free and used is all');
    my ($of_three) = $plugin->status('pve', { %$scfg, 'holdfast-layout' => 'mirror:3' }, {});
    cmp_ok($of_three, '<', $total, 'three copies leave less');
    dies(sub { $plugin->status('pve', { %$scfg, 'holdfast-layout' => 'mirror:9' }) }, qr/mirror:9/, 'an odd layout');
};

subtest 'a disk is made, written and read' => sub {
    is($plugin->alloc_image('pve', $scfg, 100, 'raw', undef, 64 * 1024), 'vm-100-disk-0');
    is($plugin->alloc_image('pve', $scfg, 100, 'raw', undef, 528), 'vm-100-disk-1', 'the first name that is free');
    is($plugin->alloc_image('pve', $scfg, 100, 'raw', 'vm-100-state-s', 4 * 1024), 'vm-100-state-s');
    dies(sub { $plugin->alloc_image('pve', $scfg, 100, 'raw', 'vm-100-disk-0', 1024) }, qr/there already/, 'a name twice');
    dies(sub { $plugin->alloc_image('pve', $scfg, 100, 'raw', 'vm-101-disk-0', 1024) }, qr/vm-100-NAME/, 'of another');
    dies(sub { $plugin->alloc_image('pve', $scfg, 100, 'qcow2', undef, 1024) }, qr/raw/, 'another format');
    dies(sub { $plugin->alloc_image('pve', $scfg, 100, 'raw', undef, 1 << 50) }, qr/1 PiB/, 'too large');
    is_deeply(volumes(), ['pve.vm-100-disk-0', 'pve.vm-100-disk-1', 'pve.vm-100-state-s'], 'nothing else is left');
    is($plugin->volume_size_info($scfg, 'pve', 'vm-100-disk-1'), 1 << 20, 'the least that a volume has');
    my ($size, $format, undef, $parent) = $plugin->volume_size_info($scfg, 'pve', 'vm-100-disk-0');
    is_deeply([$size, $format, $parent], [64 << 20, 'raw', undef]);

    ok($plugin->activate_volume('pve', $scfg, 'vm-100-disk-0')) for 1 .. 2;
    my $blockdev = blockdev($plugin->qemu_blockdev_options($scfg, 'pve', 'vm-100-disk-0', '9.0+pve0', {}));
    writes($blockdev, 0x11, '0', '8M', 'by the options for QEMU');
    reads(path_of('vm-100-disk-0'), 0x11, '0', '8M', 'by the path');
    reads($blockdev, 0, '8M', '56M', 'the rest is zero');
    ok($plugin->deactivate_volume('pve', $scfg, 'vm-100-disk-0')) for 1 .. 2;
};

subtest 'images are listed' => sub {
    my ($disk) = @{ $plugin->list_images('pve', $scfg, 100, ['pve:vm-100-disk-0']) };
    is_deeply([@{$disk}{qw(volid format size vmid parent)}], ['pve:vm-100-disk-0', 'raw', 64 << 20, 100, undef]);
    is_deeply(volids(100), ['pve:vm-100-disk-0', 'pve:vm-100-disk-1', 'pve:vm-100-state-s']);
    is_deeply(volids(10), [], 'of a machine whose number begins so');
    my $other = { %$scfg, 'holdfast-prefix' => 'other' };
    is($plugin->alloc_image('pve', $other, 100, 'raw', undef, 1024), 'vm-100-disk-0', 'another prefix, the same name');
    is_deeply([map { $_->{volid} } @{ $plugin->list_images('pve', $other) }], ['pve:vm-100-disk-0']);
    is(scalar(@{ volids() }), 3, 'which is not among ours');
    $plugin->free_image('pve', $other, 'vm-100-disk-0', 0, 'raw');
};

subtest 'snapshots' => sub {
    my $disk = 'vm-100-disk-0';
    ok(!defined($plugin->volume_snapshot($scfg, 'pve', $disk, 'monday')));
    dies(sub { $plugin->volume_snapshot($scfg, 'pve', $disk, 'monday') }, qr/already/, 'one of that name');
    writes(path_of($disk), 0x22, '4M', '8M', 'after the snapshot');
    $plugin->volume_snapshot($scfg, 'pve', $disk, 'tuesday');
    my $info = $plugin->volume_snapshot_info($scfg, 'pve', $disk);
    is_deeply([sort keys %$info], ['monday', 'tuesday']);
    cmp_ok($info->{monday}->{timestamp}, '>', 1_600_000_000, 'when it was taken');
    isnt($info->{monday}->{id}, $info->{tuesday}->{id}, 'each has a number of its own');
    is($info->{monday}->{'virtual-size'}, 64 << 20);

    $plugin->activate_volume('pve', $scfg, $disk, 'monday');
    my $options = $plugin->qemu_blockdev_options($scfg, 'pve', $disk, '9.0+pve0', { 'snapshot-name' => 'monday' });
    reads(blockdev($options, 1), 0x11, '0', '8M', 'a snapshot shows what was');
    ok($plugin->deactivate_volume('pve', $scfg, $disk, 'monday'));

    ok($plugin->volume_rollback_is_possible($scfg, 'pve', $disk, 'monday'), 'although there is a later one');
    for (1 .. 2) {
        $plugin->volume_snapshot_rollback($scfg, 'pve', $disk, 'monday');
        reads(path_of($disk), 0x11, '0', '8M', 'rolled back');
        reads(path_of($disk), 0, '8M', '8M', 'rolled back, also behind it');
    }
    dies(sub { $plugin->volume_snapshot_rollback($scfg, 'pve', $disk, 'sunday') }, qr/no snapshot of that name/, 'no such snapshot');
    dies(sub { $plugin->volume_rollback_is_possible($scfg, 'pve', $disk, 'sunday') }, qr/sunday/, 'no such snapshot');
    ok(!defined($plugin->volume_snapshot_delete($scfg, 'pve', $disk, 'tuesday'))) for 1 .. 2;
    is_deeply([keys %{ $plugin->volume_snapshot_info($scfg, 'pve', $disk) }], ['monday']);
    dies(sub { $plugin->rename_snapshot($scfg, 'pve', $disk, 'monday', 'sunday') }, qr/keep their names/, 'renaming');
};

subtest 'a disk grows' => sub {
    for (1 .. 2) {
        ok(!defined($plugin->volume_resize($scfg, 'pve', 'vm-100-disk-0', 96 << 20, 0)));
        is($plugin->volume_size_info($scfg, 'pve', 'vm-100-disk-0'), 96 << 20);
    }
    writes(path_of('vm-100-disk-0'), 0x33, '88M', '8M', 'where it has grown');
    dies(sub { $plugin->volume_resize($scfg, 'pve', 'vm-100-disk-0', 64 << 20, 0) }, qr/lose its end/, 'less');
    dies(sub { $plugin->volume_resize($scfg, 'pve', 'vm-100-disk-0', 64 << 20, 0, 's') }, qr/keeps its size/, 'a snapshot');
    $plugin->volume_snapshot_rollback($scfg, 'pve', 'vm-100-disk-0', 'monday');
    is($plugin->volume_size_info($scfg, 'pve', 'vm-100-disk-0'), 64 << 20, 'it was as large as that');
};

subtest 'a template and its clones' => sub {
    my $from = $plugin->clone_image($scfg, 'pve', 'vm-100-disk-0', 200, 'monday');
    is($from, 'vm-200-disk-0', 'of a snapshot: a disk like any other');
    reads(path_of($from), 0x11, '0', '8M', 'with its data');
    is_deeply($plugin->volume_snapshot_info($scfg, 'pve', $from), {}, 'and no snapshot of the other');
    dies(sub { $plugin->clone_image($scfg, 'pve', 'vm-100-disk-0', 200) }, qr/neither a template/, 'of neither');
    is($plugin->create_base('pve', $scfg, $from), 'base-200-disk-0') for 1 .. 2;
    dies(sub { $plugin->create_base('pve', $scfg, 'base-200-disk-0') }, qr/already/, 'of a template');
    dies(sub { $plugin->create_base('pve', $scfg, 'vm-207-disk-0') }, qr/no volume/, 'of nothing');
    is_deeply($plugin->volume_snapshot_info($scfg, 'pve', 'base-200-disk-0'), {}, 'its own snapshot is not shown');
    my @clones = map { $plugin->clone_image($scfg, 'pve', 'base-200-disk-0', 201) } 1 .. 2;
    is_deeply(\@clones, ['base-200-disk-0/vm-201-disk-0', 'base-200-disk-0/vm-201-disk-1']);
    writes(path_of($clones[0]), 0x44, '0', '1M', 'a clone is written to');
    reads(path_of($clones[0]), 0x11, '1M', '7M', 'and has the rest of its template');
    reads(path_of($clones[1]), 0x11, '0', '8M', 'which the other has, too');
    reads(path_of('base-200-disk-0'), 0x11, '0', '8M', 'as ever');
    is_deeply(volids(201), ['pve:base-200-disk-0/vm-201-disk-0', 'pve:base-200-disk-0/vm-201-disk-1']);
    my (undef, undef, undef, $parent) = $plugin->volume_size_info($scfg, 'pve', $clones[0]);
    is($parent, 'base-200-disk-0@pve.base');

    writes(path_of($clones[1]), 0x55, '7M', '1M', 'the other is written to as well');
    is($plugin->create_base('pve', $scfg, $clones[1]), 'base-200-disk-0/base-201-disk-1', 'a template of a clone');
    is($plugin->clone_image($scfg, 'pve', 'base-200-disk-0/base-201-disk-1', 202), 'base-201-disk-1/vm-202-disk-0');
    reads(path_of('base-201-disk-1/vm-202-disk-0'), 0x11, '0', '7M', 'the third generation has what the first wrote');
    reads(path_of('base-201-disk-1/vm-202-disk-0'), 0x55, '7M', '1M', 'and what the second did');

    is($plugin->rename_volume($scfg, 'pve', $clones[0], 203), 'pve:base-200-disk-0/vm-203-disk-0', 'to another machine');
    dies(sub { $plugin->rename_volume($scfg, 'pve', $clones[0], 203) }, qr/no volume/, 'it is there no more');
    dies(sub { $plugin->rename_volume($scfg, 'pve', 'vm-100-disk-1', 100, 'vm-100-disk-0') }, qr/exists|already/, 'one is there');

    dies(sub { $plugin->free_image('pve', $scfg, 'base-200-disk-0', 1) }, qr/holds data of others/, 'a template in use');
    for my $volname ('base-201-disk-1/vm-202-disk-0', 'base-200-disk-0/base-201-disk-1', 'base-200-disk-0/vm-203-disk-0',
        'base-200-disk-0') {
        ok(!defined($plugin->free_image('pve', $scfg, $volname, $volname =~ /base-[0-9]+-disk-[0-9]+\z/, 'raw')));
    }
    is_deeply(volids(), ['pve:vm-100-disk-0', 'pve:vm-100-disk-1', 'pve:vm-100-state-s'], 'all of them can be deleted');
};

subtest 'protection, and deletion' => sub {
    $plugin->update_volume_attribute($scfg, 'pve', 'vm-100-disk-0', 'protected', 1) for 1 .. 2;
    ok($plugin->get_volume_attribute($scfg, 'pve', 'vm-100-disk-0', 'protected'));
    dies(sub { $plugin->free_image('pve', $scfg, 'vm-100-disk-0', 0, 'raw') }, qr/protected/, 'what is protected');
    $plugin->update_volume_attribute($scfg, 'pve', 'vm-100-disk-0', 'protected', 0);
    ok(!$plugin->get_volume_attribute($scfg, 'pve', 'vm-100-disk-0', 'protected'));
    ok(!defined($plugin->get_volume_attribute($scfg, 'pve', 'vm-100-disk-0', 'notes')));
    dies(sub { $plugin->update_volume_attribute($scfg, 'pve', 'vm-100-disk-0', 'notes', 'x') }, qr/is not kept/, 'notes');
    for my $volname (qw(vm-100-disk-0 vm-100-disk-1 vm-100-state-s)) {
        my @warned;
        local $SIG{__WARN__} = sub { push @warned, @_ };
        ok(!defined($plugin->free_image('pve', $scfg, $volname, 0, 'raw'))) for 1 .. 2;
        like("@warned", qr/\Adisk `$volname` is gone already\n\z/, 'the second time it is said');
    }
    is_deeply(volumes(), [], 'nothing is left');
    my @trash = map { $_->{name} } @{ $grid->told($grid->look('/v1/trash'))->{trash} };
    is_deeply([sort @trash], [qw(other.vm-100-disk-0 pve.vm-100-disk-0 pve.vm-100-disk-1)], 'disks can be had back');
};

done_testing();
