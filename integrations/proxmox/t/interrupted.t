#!/usr/bin/perl -T

# What becomes of calls whose answer is lost, whose host is started anew, or that are killed: HOLDFAST_DIR is the grid's directory.

use strict;
use warnings;

use File::Temp qw(tempdir);
use POSIX ();
use Test::More;

use Disks;
use Flaky;
use Holdfast::Client;
use PVE::Storage::Custom::HoldfastPlugin;

my $plugin = 'PVE::Storage::Custom::HoldfastPlugin';
my $dir = grid_dir('HOLDFAST_DIR');
my $straight = { type => 'holdfast', 'holdfast-dir' => $dir, 'holdfast-layout' => 'mirror:2' };
my $grid = Holdfast::Client->new(dir => $dir);

# What the grid has, of volumes with their snapshots.
sub there {
    my $volumes = $grid->told($grid->look('/v1/volumes'))->{volumes};
    my %there = map { $_->{name} => join(' ', map { $_->{name} } @{ $_->{live}->{snapshots} // [] }) } @$volumes;
    return \%there;
}

# Calls the plugin through a socket on which each change of that kind meets its fate the first time.
sub with {
    my ($fate, $change, $call) = @_;
    my ($before) = tempdir(CLEANUP => 1) =~ /\A(.*)\z/;
    my $flaky = Flaky::start("$dir/api.sock", $before, sub {
        my ($method, $path, $count) = @_;
        return "$method $path" =~ $change && $count == 1 ? $fate : 'pass';
    });
    my $result = eval { $call->({ %$straight, 'holdfast-dir' => $before }) };
    my $why = $@;
    Flaky::stop($flaky);
    return ($result, $why);
}

# In a process of its own, which is killed before it hears of that change: gives how it ended.
sub killed_at {
    my ($change, $call) = @_;
    my ($status) = with('kill', $change, sub {
        my ($scfg) = @_;
        my $pid = fork() // die "fork: $!\n";
        if (!$pid) {
            eval { $call->($scfg) };
            POSIX::_exit(0);
        }
        waitpid($pid, 0);
        return $?;
    });
    return is($status, 9, 'it was killed');
}

for my $fate (qw(lose forget)) {
    my $what = $fate eq 'lose' ? 'an answer that is lost' : 'a host that was started anew';
    subtest $what => sub {
        my ($made) = with($fate, qr{\APOST /v1/volumes\z}, sub { $plugin->alloc_image('pve', $_[0], 300, 'raw', undef, 8192) });
        is($made, 'vm-300-disk-0', 'made once');
        my (undef, $why) = with($fate, qr{snapshots\z}, sub { $plugin->volume_snapshot($_[0], 'pve', $made, 'monday') });
        is($why, '', 'the snapshot is taken');
        (undef, $why) = with($fate, qr{rollback\z}, sub { $plugin->volume_snapshot_rollback($_[0], 'pve', $made, 'monday') });
        is($why, '', 'rolled back');
        (undef, $why) = with($fate, qr{resize\z}, sub { $plugin->volume_resize($_[0], 'pve', $made, 16 << 20, 0) });
        is($why, '', 'grown');
        my ($clone) = with($fate, qr{clone\z}, sub { $plugin->clone_image($_[0], 'pve', $made, 301, 'monday') });
        is($clone, 'vm-301-disk-0', 'cloned once');
        my ($base) = with($fate, qr{rename\z}, sub { $plugin->create_base('pve', $_[0], $clone) });
        is($base, 'base-301-disk-0', 'a template');
        is_deeply(there(), { 'pve.vm-300-disk-0' => 'monday', 'pve.base-301-disk-0' => 'pve.base' }, 'and no more than that');
        my ($renamed) = with($fate, qr{rename\z}, sub { $plugin->rename_volume($_[0], 'pve', $made, 302) });
        is($renamed, 'pve:vm-302-disk-0', 'renamed');
        (undef, $why) = with($fate, qr{\ADELETE.*snapshots/}, sub {
            $plugin->volume_snapshot_delete($_[0], 'pve', 'vm-302-disk-0', 'monday');
        });
        is($why, '', 'the snapshot is deleted');
        for my $volname ('base-301-disk-0', 'vm-302-disk-0') {
            (undef, $why) = with($fate, qr{\ADELETE}, sub { $plugin->free_image('pve', $_[0], $volname, 0, 'raw') });
            is($why, '', "$volname is deleted");
        }
        is_deeply(there(), {}, 'nothing is left');
    };
}

subtest 'killed in the middle' => sub {
    $plugin->alloc_image('pve', $straight, 400, 'raw', undef, 8192);
    my $path = $plugin->path($straight, 'vm-400-disk-0', 'pve');
    writes($path, 0x55, '0', '4M', 'data');
    killed_at(qr{\APOST .*snapshots\z}, sub { $plugin->create_base('pve', $_[0], 'vm-400-disk-0') });
    is_deeply(there(), { 'pve.base-400-disk-0' => '' }, 'half a template');
    is($plugin->create_base('pve', $straight, 'vm-400-disk-0'), 'base-400-disk-0', 'the next call makes the rest');
    killed_at(qr{clone\z}, sub { $plugin->clone_image($_[0], 'pve', 'base-400-disk-0', 401) });
    is_deeply(there(), { 'pve.base-400-disk-0' => 'pve.base' }, 'no clone, for nobody heard of it');
    is($plugin->clone_image($straight, 'pve', 'base-400-disk-0', 401), 'base-400-disk-0/vm-401-disk-0');
    reads(scalar $plugin->path($straight, 'base-400-disk-0/vm-401-disk-0', 'pve'), 0x55, '0', '4M', 'with its data');
    killed_at(qr{\ADELETE}, sub { $plugin->free_image('pve', $_[0], 'base-400-disk-0/vm-401-disk-0', 0, 'raw') });
    $plugin->free_image('pve', $straight, $_, 0, 'raw') for 'base-400-disk-0/vm-401-disk-0', 'base-400-disk-0';
    is_deeply(there(), {}, 'nothing is left');
};

subtest 'a host that is away' => sub {
    my ($nowhere) = tempdir(CLEANUP => 1) =~ /\A(.*)\z/;
    my $scfg = { %$straight, 'holdfast-dir' => $nowhere };
    dies(sub { $plugin->check_connection('pve', $scfg) }, qr/can not be reached.*is it up/, 'said at once');
};

done_testing();
